"""A peer process of the benchmark: joins rank zero, runs its jobs, and carries out its orders until it leaves.

Started by :mod:`flare_cli.bench_cache.group` as ``python -m flare_cli.bench_cache.peer`` with a :class:`PeerStart` on
standard input.
"""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Iterator

import msgspec

from flare_cache.record_group import start_peer
from flare_cli.bench_cache.orders import ORDER, REPORT, Order, OrderKind, PeerStart, Report, decode_order, encode
from flare_cli.bench_cache.rank import BenchRank, open_rank
from flare_core.errors import FlareError
from flare_transport import Address, Group, LinkOffer, RendezvousSettings, Router, TransportError, dial_link, meet

__all__ = ["RENDEZVOUS_SECONDS", "carry_out", "main"]

RENDEZVOUS_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


def main() -> None:
    """Serve until rank zero shuts the control link or is gone."""
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=PeerStart)
    group = meet(
        RendezvousSettings(
            address=Address(start.host, start.port),
            rank=start.rank,
            world_size=start.settings.world_size,
            key=start.key,
            deadline_seconds=RENDEZVOUS_SECONDS,
        )
    )
    with contextlib.closing(group):
        _serve(start, group)


def carry_out(rank: BenchRank, kind: OrderKind) -> str:
    """Do on ``rank`` what the order says; what is wrong, or the empty string."""
    try:
        match kind:
            case OrderKind.FILL:
                rank.fill()
            case OrderKind.WIPE:
                rank.wipe()
            case OrderKind.VERIFY:
                return rank.verify()
            case OrderKind.SCAN:
                rank.scan()
            case OrderKind.RAW_READ:
                rank.raw_read()
            case OrderKind.JOIN:
                return "joined already"
    except (FlareError, OSError) as error:
        return f"rank {rank.rank}: {error}"
    return ""


def _serve(start: PeerStart, group: Group) -> None:
    inbox: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
    router = Router()
    router.route(ORDER, lambda _, payload: inbox.put(decode_order(payload)))
    router.on_end(lambda _, __: inbox.put(None))
    control = group.peers[0].link
    control.start(router, pulse=lambda: b"")
    first = inbox.get()
    if first is None or first.offer is None:
        return
    with _joined(start, group, first.offer) as rank:
        while (order := inbox.get()) is not None:
            # Rank zero may leave while an order is carried out; its end is the next thing in the inbox.
            with contextlib.suppress(TransportError):
                control.send(REPORT, encode(Report(carry_out(rank, order.kind))))


@contextlib.contextmanager
def _joined(start: PeerStart, group: Group, offer: LinkOffer) -> Iterator[BenchRank]:
    """The rank, joined over the offered record link, on which its jobs come."""
    rank = open_rank(start.settings, start.rank)
    with contextlib.closing(rank):
        link = dial_link(group.session, group.peers[0].identity, offer)
        peer = start_peer(rank.setup(), link, run_id=group.session.run_id, on_end=lambda _: None)
        try:
            yield rank
        finally:
            peer.close(_CLOSE_SECONDS)


if __name__ == "__main__":
    main()
