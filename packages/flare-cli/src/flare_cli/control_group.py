"""A rank's place among the others: the rendezvous, the control links, and what runs over them besides plans.

Over each control link run the star exchange, the key-value table, step plans, offers of further links, and heartbeats
with the last finished step. Knows no engine and no cache: others route what is theirs.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from flare_cache.loss import loss_of
from flare_cli.agreement import Offer, agree, decode_offers, encode_offer
from flare_cli.config import RunConfig
from flare_cli.salt import load_cluster_key
from flare_transport import (
    HEARTBEAT,
    Address,
    FrameType,
    Group,
    HeartbeatSettings,
    KeyValue,
    KeyValueService,
    Link,
    LinkEnd,
    LinkOffer,
    LinkSettings,
    RemoteProtocolError,
    RendezvousSettings,
    Router,
    Security,
    Sighting,
    StarExchange,
    TransportError,
    key_value_over,
    meet,
)

__all__ = ["CALLED_OFF", "DRAIN_ASKED", "OFFER", "PLAN", "ControlGroup", "PeerView", "describe_sighting", "join_group"]

PLAN = FrameType(48, "PLAN", 64 << 20)
OFFER = FrameType(49, "OFFER", 4096)
DRAIN_ASKED = FrameType(50, "DRAIN_ASKED", 0)
CALLED_OFF = FrameType(51, "CALLED_OFF", 0)

LOADING_DEADLINE_SECONDS = 60.0
"""How long a rank may be silent until all have loaded: importing torch from a slow disk stops every thread."""

TELL_SECONDS = 10.0
CALL_OFF_SECONDS = 1.0

_STEP = struct.Struct("<Q")


@dataclass(slots=True)
class PeerView:
    """What rank zero last heard of a peer."""

    address: str
    step: int = 0
    heard_at: float = field(default_factory=time.monotonic)


class ControlGroup:
    """The control links of one rank, started. At world size 1 there are none.

    ``on_loss`` is told, on a link's thread, of a link that ended before ``expect_end``; ``on_drain_asked`` (rank zero)
    that a peer got the signal to end; ``on_called_off`` (a peer) that rank zero gives the start up.
    """

    def __init__(
        self,
        group: Group,
        *,
        on_loss: Callable[[str], None],
        on_drain_asked: Callable[[int], None] = lambda _: None,
        on_called_off: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = group.session
        self.identities = {rank: peer.identity for rank, peer in group.peers.items()}
        self.exchange = StarExchange(group.session.rank, group.session.world_size)
        self.plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.offers: queue.SimpleQueue[LinkOffer] = queue.SimpleQueue()
        self.views = {rank: PeerView(peer.identity.remote_address) for rank, peer in group.peers.items()}
        self.last_step = 0
        self._links: dict[int, Link] = {rank: peer.link for rank, peer in group.peers.items()}
        self._on_loss = on_loss
        self._on_drain_asked = on_drain_asked
        self._on_called_off = on_called_off
        self._expects_end = threading.Event()
        self._ended = threading.Event()
        self._table: KeyValueService | KeyValue = KeyValueService()
        for rank, link in self._links.items():
            self._start(rank, link)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.session.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.session.world_size

    @property
    def local_address(self) -> str:
        """The address of this host's interface at which the ranks meet; loopback at world size 1."""
        return next((identity.local_address for identity in self.identities.values()), "127.0.0.1")

    def key_value(self) -> KeyValue:
        """The table that lives on rank zero, as this rank reaches it."""
        return self._table.client() if isinstance(self._table, KeyValueService) else self._table

    def all_gather(self, data: bytes) -> list[bytes]:
        """``data`` of every rank, by rank; blocks until all have called. Raises ``LinkLost``."""
        return [data] if self.world_size == 1 else self.exchange.all_gather(data)

    def agree(self, offer: Offer) -> Mapping[str, int]:
        """Compare settings with all ranks; see ``agreement.agree``. Blocks until all have called."""
        return agree(decode_offers(self.all_gather(encode_offer(offer))))

    def tell_failure(self, message: str) -> None:
        """This rank cannot start: the others learn why at their next ``agree``. Blocks up to 10 s for them."""
        if self.world_size > 1:
            with contextlib.suppress(TransportError, TimeoutError):
                offer = encode_offer(Offer({}, failure=message))
                self.exchange.all_gather(offer, timeout_seconds=TELL_SECONDS)

    def wait_for_end(self) -> None:
        """On a peer that cannot start: leave only when rank zero does, so that it is no loss to rank zero."""
        self._ended.wait(TELL_SECONDS)

    def expect_heartbeats(self) -> None:
        """Every rank has loaded: from now on one that is silent for a few seconds is lost."""
        for link in self._links.values():
            link.expect_heartbeats_within(HeartbeatSettings().deadline_seconds)

    def send_plan(self, plan: bytes) -> None:
        """Hand a step plan to every peer. Raises ``TransportError``."""
        for link in self._links.values():
            link.send(PLAN, plan)

    def send_offer(self, rank: int, offer: LinkOffer) -> None:
        """Offer a peer one more link. Raises ``TransportError``."""
        self._links[rank].send(OFFER, msgspec.msgpack.encode(offer))

    def ask_to_drain(self) -> None:
        """Tell rank zero that this peer got the signal to end. Raises ``TransportError``."""
        self._links[0].send(DRAIN_ASKED)

    def call_off(self) -> None:
        """On rank zero: nothing was served and nothing will be. Blocks up to a second for the peers to hear it."""
        self._expects_end.set()
        for link in self._links.values():
            with contextlib.suppress(TransportError):
                link.send(CALLED_OFF)
        self.close(wait_seconds=CALL_OFF_SECONDS)

    def expect_end(self) -> None:
        """From now on a link that ends in order is no loss."""
        self._expects_end.set()

    def close(self, *, wait_seconds: float = 5.0) -> None:
        """Part from all in order, and wait for it."""
        self._expects_end.set()
        for link in self._links.values():
            link.shutdown()
        for link in self._links.values():
            link.wait_ended(wait_seconds)

    def _start(self, rank: int, link: Link) -> None:
        router = Router()
        self.exchange.attach(rank, link, router)
        if self.rank == 0:
            if isinstance(self._table, KeyValueService):
                self._table.attach(router)
            router.route(DRAIN_ASKED, lambda _, __: self._on_drain_asked(rank))
        else:
            self._table = key_value_over(link, router)
            router.route(PLAN, lambda _, payload: self.plans.put(bytes(payload)))
            router.route(OFFER, lambda _, payload: self.offers.put(_decode_offer(payload)))
            router.route(CALLED_OFF, lambda _, __: self._on_called_off())
        router.route(HEARTBEAT, lambda _, payload: self._hear(rank, payload))
        router.on_end(lambda _, end: self._take_end(rank, end))
        link.start(router, pulse=lambda: _STEP.pack(self.last_step))

    def _hear(self, rank: int, payload: memoryview) -> None:
        view = self.views[rank]
        view.heard_at = time.monotonic()
        if len(payload) == _STEP.size:
            (view.step,) = _STEP.unpack(payload)

    def _take_end(self, rank: int, end: LinkEnd) -> None:
        # On a peer an end in order is rank zero's word that the group ends.
        is_expected = self._expects_end.is_set() or self.rank > 0
        self._ended.set()
        if end.is_loss or not is_expected:
            self._on_loss(f"{loss_of(end)}: rank {rank} is lost: {end.detail}")
        else:
            self.plans.put(None)


def _decode_offer(payload: memoryview) -> LinkOffer:
    try:
        return msgspec.msgpack.decode(payload, type=LinkOffer)
    except msgspec.MsgspecError as error:
        msg = f"an offer of a link cannot be read: {error}"
        raise RemoteProtocolError(msg) from None


def describe_sighting(sighting: Sighting) -> str:
    """One line for the log."""
    who = sighting.source if sighting.rank is None else f"rank {sighting.rank} at {sighting.source}"
    return f"{who}: {sighting.detail}"


def join_group(config: RunConfig, observe: Callable[[Sighting], None]) -> Group:
    """Meet the other ranks; blocks until all have come.

    Raises:
        UsageError: the key file. TransportError: the deadline passed (missing ranks by number), or why this rank was
            refused.
    """
    if config.world_size == 1 or config.rendezvous is None:
        key, address = bytes(32), Address("127.0.0.1", 1)
    else:
        key = bytes(32) if config.key_file is None else load_cluster_key(config.key_file)
        address = Address(config.rendezvous.host, config.rendezvous.port)
    settings = RendezvousSettings(
        address=address,
        rank=config.rank,
        world_size=config.world_size,
        key=key,
        security=Security.PLAINTEXT if config.insecure_plaintext else Security.TLS,
        deadline_seconds=config.rendezvous_timeout,
        link=LinkSettings(heartbeat=HeartbeatSettings(deadline_seconds=LOADING_DEADLINE_SECONDS)),
    )
    return meet(settings, observe=observe)
