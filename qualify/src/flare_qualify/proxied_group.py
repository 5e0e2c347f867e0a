"""A group whose last peer reaches rank zero through a fault proxy, with a new proxy for each start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flare_qualify.fault_drill import Drill, open_drill
from flare_qualify.faults.proxied_peer import ProxiedPeer, listening_ports, proxied_peer
from flare_qualify.faults.proxy import FaultProxy
from flare_qualify.group import Group
from flare_qualify.run_context import Context

__all__ = ["ProxiedGroup", "open_proxied_drill"]


@dataclass(slots=True)
class ProxiedGroup:
    """Starts and stops the group; ``undo`` holds what a start has made beside it."""

    group: Group
    undo: contextlib.ExitStack
    peers: list[ProxiedPeer] = field(default_factory=list)

    @property
    def proxy(self) -> FaultProxy:
        """The proxy of the last start."""
        return self.peers[-1].proxy

    def launch(self, before: Callable[[FaultProxy], None] = lambda _: None) -> None:
        """Start every rank, the last one behind a new proxy, and wait for nothing; ``before`` may arm the proxy."""
        self.stop()
        group, last = self.group, self.group.world_size - 1
        peer = self.undo.enter_context(
            proxied_peer(lambda: listening_ports(group.processes[0].pid) if 0 in group.processes else set())
        )
        self.peers.append(peer)
        group.rank_prefix[last] = peer.prefix
        before(peer.proxy)
        group.prepare()
        peer.meet_at(group.rendezvous_port)
        for rank in range(group.world_size):
            group.launch_rank(rank)

    def start(self) -> None:
        """:meth:`launch`, and wait until it serves."""
        self.launch()
        self.group.wait_healthy()

    def stop(self) -> None:
        """Kill what runs, then end its proxy and namespace."""
        self.group.kill_all()
        self.undo.close()


@contextlib.contextmanager
def open_proxied_drill(context: Context, *options: str, world_size: int = 2) -> Iterator[tuple[ProxiedGroup, Drill]]:
    """A drill whose group stands behind a proxy and has learnt its answers."""
    group = context.group("oracle", world_size, *options)
    with contextlib.ExitStack() as undo:
        proxied = ProxiedGroup(group, undo)
        try:
            proxied.start()
            with open_drill(context, group, num_prompts=2) as drill:
                yield proxied, drill
        finally:
            group.kill_all()
