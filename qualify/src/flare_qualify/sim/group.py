"""One run of all ranks: their processes, links and roles, from the first start to the last end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flare_core.errors import FlareError
from flare_qualify.sim.leader import Leader, LeaderWatch
from flare_qualify.sim.links import SimLink, Wire, connect
from flare_qualify.sim.peer import Peer
from flare_qualify.sim.process import RankProcess, RunContext, Supervisor

__all__ = ["Group", "GroupWatch"]

_START_SECONDS = 0.2
_MEET_SECONDS = 0.01


class GroupWatch(Supervisor, LeaderWatch, Protocol):
    """Who looks at a run."""

    def rank_joined(self, process: RankProcess) -> None: ...

    def peer_sent(self, group: Group, rank: int, frame_type: object, payload: bytes) -> None: ...


class Group:
    """See the module. ``number`` counts the runs of one world."""

    def __init__(self, context: RunContext, number: int, watch: GroupWatch) -> None:
        self.context = context
        self.number = number
        self.watch = watch
        self.processes = [RankProcess(context, rank) for rank in range(context.options.world_size)]
        self.leader = Leader(self.processes[0], watch)
        self.peers = [Peer(process, watch.rank_joined) for process in self.processes[1:]]
        self.began_at = context.loop.now
        self.first_death: float | None = None
        self.last_death = 0.0
        self.is_lethal = False
        """A fault was injected that may end this run."""
        self.may_fail_join = False
        """Calls on files may fail that a start cannot do without."""
        self.stalled_seconds = 0.0
        self.lost_since: float | None = None
        """Since when nothing arrives on some link."""
        self.reasons: list[str] = []
        self.confirmed: set[int] = set()
        self.has_joined = False
        self._num_open = 0
        self._have_met = False

    @property
    def is_serving(self) -> bool:
        """Every rank has joined and lives."""
        return all(process.is_joined and process.is_alive for process in self.processes)

    @property
    def is_dead(self) -> bool:
        """No process is left."""
        return not any(process.is_alive for process in self.processes)

    def start(self) -> None:
        """Start every process; they meet once all have opened their directories."""
        for process in self.processes:
            delay = _START_SECONDS * self.context.rng.random()
            process.after(delay, f"{process.name} starts", self._opener(process))

    def _opener(self, process: RankProcess) -> Callable[[], None]:
        def open_rank() -> None:
            try:
                process.open()
            except (OSError, FlareError) as error:
                process.end(f"cannot start: {error}")
                return
            self._num_open += 1
            if self._num_open == len(self.processes):
                self.context.loop.after(_MEET_SECONDS, "ranks meet", self._meet)

        return open_rank

    def call_off(self) -> None:
        """Some rank is gone: the others, if they have not met it, give up too."""
        if not self._have_met:
            for process in self.processes:
                process.end("called off")

    def _meet(self) -> None:
        if not all(process.is_alive for process in self.processes):
            for process in self.processes:
                process.end("called off")
            return
        self._have_met = True
        first = self.processes[0]
        controls: dict[int, SimLink] = {}
        records: dict[int, SimLink] = {}
        for peer in self.peers:
            rank = peer.process.rank
            controls[rank], control = self._connect(first, peer.process, "control")
            records[rank], record = self._connect(first, peer.process, "record")
            record.watch = self.watch_join(rank)
            self._begin(peer.process, lambda peer=peer, control=control, record=record: peer.begin(control, record))  # type: ignore[misc]
        self._begin(first, lambda: self.leader.begin(controls, records))

    def _begin(self, process: RankProcess, call: Callable[[], None]) -> None:
        process.after(_MEET_SECONDS * self.context.rng.random(), f"{process.name} joins", call)

    def watch_join(self, rank: int) -> Callable[[object, bytes], None]:
        """See what a peer sends on its record link."""
        return lambda frame_type, payload: self.watch.peer_sent(self, rank, frame_type, payload)

    def _connect(self, first: RankProcess, second: RankProcess, kind: str) -> tuple[SimLink, SimLink]:
        context = self.context
        latency = context.options.latency_seconds
        wires = tuple(Wire(latency * (0.5 + context.rng.random()), latency) for _ in range(2))
        ends = connect(
            (f"{kind} r0-{second.name}", f"{kind} {second.name}-r0"),
            context.loop,
            context.rng,
            after=(first.after, second.after),
            wires=(wires[0], wires[1]),
            split_rate=0.1,
        )
        first.links.append(ends[0])
        second.links.append(ends[1])
        return ends
