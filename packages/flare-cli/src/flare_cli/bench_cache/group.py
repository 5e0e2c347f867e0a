"""Rank zero of the benchmark: starts the peers, meets them, and stores, restores and gives orders on the whole group.

The group is built as the server builds it: rendezvous, control links, record links over TLS, join, prefix store.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from flare_cache.outcomes import ShardedLimits
from flare_cache.record_group import LeaderGroup, start_leader
from flare_cli.bench_cache.orders import ORDER, REPORT, Order, OrderKind, PeerStart, decode_report, encode
from flare_cli.bench_cache.peer import RENDEZVOUS_SECONDS, carry_out
from flare_cli.bench_cache.rank import BenchRank, open_rank
from flare_cli.bench_cache.settings import GroupSettings
from flare_core.errors import FlareError
from flare_core.prefix import FetchFinished, PrefixQuery, StoreEvent, StoreFinished, StoreRequest, Tier
from flare_transport import Address, Group, Link, RendezvousSettings, Router, TransportError, meet, open_link_listener

__all__ = ["BenchGroup", "open_group"]

_HOST = "127.0.0.1"
_CLOSE_SECONDS = 10.0


class BenchGroup:
    """A running group, seen from rank zero; :func:`open_group` makes one. Used by one thread; calls block."""

    def __init__(
        self,
        rank: BenchRank,
        leader: LeaderGroup,
        controls: Sequence[Link],
        *,
        news: threading.Event,
        reports: queue.SimpleQueue[str],
    ) -> None:
        self._rank = rank
        self._leader = leader
        self._controls = controls
        self._news = news
        self._reports = reports

    @property
    def direct(self) -> bool:
        """Whether rank zero's records go by O_DIRECT; the ranks' directories lie side by side."""
        return self._rank.direct

    def store(self, request: StoreRequest) -> int:
        """Store on every rank what is not stored yet, in every tier; the number of records.

        Raises:
            FlareError: a store failed. Poisoned: a rank was lost.
        """
        num_records = 0
        # A record that has waited too long for its turn is dropped, as in the server; then the rest is asked for again.
        while (ticket := self._leader.store.store(request)) is not None:
            match self._wait_for(ticket):
                case StoreFinished(num_records=num_stored) if num_stored:
                    num_records += num_stored
                case event:
                    raise FlareError(f"nothing could be stored: {event}")
        return num_records

    def restore(self, query: PrefixQuery, tier: Tier) -> float:
        """Look ``query`` up and restore all of it from ``tier``; seconds until lookup and sending were done.

        Raises:
            FlareError: not all of it came, or not from there. Poisoned: a rank was lost.
        """
        start = time.perf_counter()
        store = self._leader.store
        restorable = store.lookup(query)
        pages = range(query.num_device_pages, len(query.keys))
        ticket = store.fetch(query, restorable, pages=pages, row_slot=None, after_step=0)
        sent_seconds = time.perf_counter() - start
        event = self._wait_for(ticket)
        wanted = {tier: len(query.token_ids) - query.num_device_tokens}
        if not isinstance(event, FetchFinished) or event.tokens_by_tier != wanted:
            raise FlareError(f"{wanted} tokens were to be restored: {event}")
        return sent_seconds

    def forget_memory(self) -> None:
        """Empty the memory tier of every rank."""
        store = self._leader.store
        store.reset(Tier.MEMORY)
        while not store.is_idle:
            self._poll()

    def carry_out(self, kind: OrderKind) -> float:
        """Have every rank do it at the same time; seconds until the last had done it.

        Raises:
            FlareError: a rank could not, found something wrong, or has left.
        """
        start = time.perf_counter()
        for control in self._controls:
            control.send(ORDER, encode(Order(kind)))
        problems = [carry_out(self._rank, kind)]
        problems += [self._reports.get() for _ in self._controls]
        seconds = time.perf_counter() - start
        if any(problems):
            raise FlareError("; ".join(filter(None, problems)))
        return seconds

    def _poll(self) -> Sequence[StoreEvent]:
        """Events of the store; waits for news where there are none."""
        events = self._leader.store.poll()
        if not events and not self._leader.store.is_idle:
            self._news.wait()
            self._news.clear()
        return events

    def _wait_for(self, ticket: int) -> StoreEvent:
        while True:
            for event in self._poll():
                if event.ticket == ticket:
                    return event


@contextlib.contextmanager
def open_group(settings: GroupSettings) -> Iterator[BenchGroup]:
    """Start a group's peer processes and join them; every process and thread of it has ended afterwards.

    Raises:
        FlareError: a peer did not come, or was lost; its own messages are on standard error.
    """
    try:
        with _open_group(settings) as group:
            yield group
    except TransportError as error:
        raise FlareError(f"the group of {settings.world_size} ranks broke: {error}") from error


@contextlib.contextmanager
def _open_group(settings: GroupSettings) -> Iterator[BenchGroup]:
    key, port = secrets.token_bytes(32), _free_port()
    with contextlib.ExitStack() as stack:
        for rank in range(1, settings.world_size):
            stack.enter_context(_peer_process(PeerStart(settings=settings, rank=rank, host=_HOST, port=port, key=key)))
        group = meet(
            RendezvousSettings(
                address=Address(_HOST, port),
                rank=0,
                world_size=settings.world_size,
                key=key,
                deadline_seconds=RENDEZVOUS_SECONDS,
            )
        )
        stack.callback(_part, group)
        rank_zero = stack.enter_context(contextlib.closing(open_rank(settings, 0)))
        yield stack.enter_context(_joined(settings, group, rank_zero))


@contextlib.contextmanager
def _joined(settings: GroupSettings, group: Group, rank: BenchRank) -> Iterator[BenchGroup]:
    """The group's record path; ended in order at last."""
    news = threading.Event()
    reports: queue.SimpleQueue[str] = queue.SimpleQueue()
    for peer in group.peers.values():
        peer.link.start(_control_router(reports), pulse=lambda: b"")
    leader = start_leader(
        rank.setup(),
        _record_links(group),
        run_id=group.session.run_id,
        on_outcome=news.set,
        on_poison=lambda _: news.set(),
        limits=ShardedLimits(max_outstanding=settings.num_outstanding),
    )
    try:
        yield BenchGroup(rank, leader, [peer.link for peer in group.peers.values()], news=news, reports=reports)
    finally:
        leader.close(_CLOSE_SECONDS)


def _control_router(reports: queue.SimpleQueue[str]) -> Router:
    router = Router()
    router.route(REPORT, lambda _, payload: reports.put(decode_report(payload).problem))
    router.on_end(lambda _, end: reports.put(end.detail))
    return router


def _record_links(group: Group) -> Mapping[int, Link]:
    """Offer every peer a record link; those links, not started."""
    if not group.peers:
        return {}
    listener = open_link_listener(group.session, [peer.identity for peer in group.peers.values()], purpose="records")
    for rank, peer in group.peers.items():
        peer.link.send(ORDER, encode(Order(OrderKind.JOIN, offer=listener.offers[rank])))
    return listener.accept()


def _part(group: Group) -> None:
    """End the control links in order: the peers' word to leave."""
    for peer in group.peers.values():
        peer.link.shutdown()
    for peer in group.peers.values():
        peer.link.wait_ended(_CLOSE_SECONDS)


@contextlib.contextmanager
def _peer_process(start: PeerStart) -> Iterator[None]:
    """A peer; it ends by itself when rank zero's control link does."""
    command = [sys.executable, "-m", "flare_cli.bench_cache.peer"]
    # A session of its own: the terminal's interrupt is for rank zero, which then ends the group in order.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdin is not None  # noqa: S101 - a type's proof: it was asked for
        with process.stdin:
            process.stdin.write(msgspec.json.encode(start))
        yield
    finally:
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        return int(listener.getsockname()[1])
