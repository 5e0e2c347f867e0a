"""A group for benchmarks of the record path: rank zero in this process, every peer in one of its own.

Ranks meet as the server's do: rendezvous, control links, record links over TLS, join. Their pages are few and their
engine is absent.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flare_cache.record_group import LeaderGroup, start_leader, start_peer
from flare_cache.testing import GroupPlan, LocalRank, make_rank, token_geometries
from flare_cli.control_group import ControlGroup
from flare_qualify.group import free_port
from flare_transport import Address, Link, RendezvousSettings, dial_link, meet, open_link_listener

__all__ = ["PAGE_TOKENS", "ProcessGroup", "bench_plan", "open_processes"]

PAGE_TOKENS = 64
_PAGE_VALUES = 16
_NUM_PAGES = 64
_MEMORY_BYTES = 64 << 20
_HOST = "127.0.0.1"
_CLOSE_SECONDS = 60.0


def bench_plan(world_size: int, root: Path | None) -> GroupPlan:
    """Pages of 4096 bytes; records on disk in ``root``, or without one in memory."""
    geometries = token_geometries(world_size, page_tokens=PAGE_TOKENS, dims=[_PAGE_VALUES] * world_size)
    memory_bytes = None if root is not None else _MEMORY_BYTES
    return GroupPlan(geometries=geometries, root=root, num_pages=_NUM_PAGES, memory_bytes=memory_bytes)


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Rank zero of a group whose ranks have met and opened their directories, and have not joined yet."""

    rank: LocalRank
    control: ControlGroup

    @contextlib.contextmanager
    def joined(self) -> Iterator[tuple[LeaderGroup, float]]:
        """The group, joined, and seconds from the first offer of a record link on; ended in order, hints written."""
        start = time.perf_counter()
        leader = start_leader(
            self.rank.setup,
            self._record_links(),
            run_id=self.control.session.run_id,
            on_outcome=lambda: None,
            on_poison=_complain,
        )
        seconds = time.perf_counter() - start
        yield leader, seconds
        leader.close(_CLOSE_SECONDS)

    def _record_links(self) -> dict[int, Link]:
        identities = list(self.control.identities.values())
        listener = open_link_listener(self.control.session, identities, purpose="records")
        for rank, offer in listener.offers.items():
            self.control.send_offer(rank, offer)
        return listener.accept()


@contextlib.contextmanager
def open_processes(world_size: int, root: Path | None) -> Iterator[ProcessGroup]:
    """Start the peers and meet them; all have ended afterwards. ``root`` as in :func:`bench_plan`."""
    with contextlib.ExitStack() as stack:
        key, port = secrets.token_bytes(32), free_port()
        for rank in range(1, world_size):
            stack.enter_context(_peer_process(rank, world_size, port, root, key))
        control = _meet(0, world_size, port, key)
        stack.callback(control.close, wait_seconds=_CLOSE_SECONDS)
        local = stack.enter_context(_opened(bench_plan(world_size, root), 0))
        control.all_gather(b"")
        yield ProcessGroup(local, control)


@contextlib.contextmanager
def _peer_process(rank: int, world_size: int, port: int, root: Path | None, key: bytes) -> Iterator[None]:
    command = [sys.executable, "-m", "flare_qualify.rank_processes", str(rank), str(world_size), str(port)]
    command += [] if root is None else ["--root", str(root)]
    reader, writer = os.pipe()
    os.write(writer, key)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe, subprocess.Popen(command, stdin=pipe):
        yield


def _meet(rank: int, world_size: int, port: int, key: bytes) -> ControlGroup:
    settings = RendezvousSettings(address=Address(_HOST, port), rank=rank, world_size=world_size, key=key)
    return ControlGroup(meet(settings), on_loss=_complain)


@contextlib.contextmanager
def _opened(plan: GroupPlan, rank: int) -> Iterator[LocalRank]:
    local = make_rank(plan, rank)
    try:
        yield local
    finally:
        if local.directory is not None:
            local.directory.close()


def _complain(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)


def main() -> None:
    """A peer: it joins when rank zero offers the record link, and ends when that ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--root", type=Path)
    options = parser.parse_args()
    control = _meet(options.rank, options.world_size, options.port, sys.stdin.buffer.read())
    with _opened(bench_plan(options.world_size, options.root), options.rank) as local:
        control.all_gather(b"")
        link = dial_link(control.session, control.identities[0], control.offers.get())
        peer = start_peer(local.setup, link, run_id=control.session.run_id, on_end=lambda _: None)
        peer.service.wait_ended()
        peer.close(_CLOSE_SECONDS)
    # Rank zero parts first: a control link that a peer ends is a lost one.
    control.plans.get()
    control.close(wait_seconds=_CLOSE_SECONDS)


if __name__ == "__main__":
    main()
