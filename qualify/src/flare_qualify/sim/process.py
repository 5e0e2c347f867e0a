"""One rank's process: its time, its files, its page memory and device, and its transport, run task by task.

What rank zero and peers add is in :mod:`leader` and :mod:`peer`. A process ends at any event, or inside any call on a
file; nothing of it runs afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

from flare_cache.directory import RecordDirectory
from flare_cache.disk_shelf import DiskShelf, Durability
from flare_cache.jobs import Job, JobResult
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.record_group import RankSetup
from flare_cache.settings import CacheSettings
from flare_cache.staged import StagedTransport
from flare_cache.transfer import Shelf
from flare_core.plan import StepResult
from flare_core.prefix import Tier
from flare_qualify.sim.device import Device, Exchange
from flare_qualify.sim.disk import SimDisk
from flare_qualify.sim.files import DiskRates, ProcessKilled, SimFiles
from flare_qualify.sim.ledger import Ledger
from flare_qualify.sim.links import SimLink
from flare_qualify.sim.loop import EventLoop
from flare_qualify.sim.memory import SimMemory, SimPassage
from flare_qualify.sim.model import Model
from flare_qualify.sim.options import Options
from flare_qualify.sim.pool_manager import SimManager
from flare_qualify.sim.pool_shelf import SimPoolShelf
from flare_qualify.sim.watched_shelf import TransferWatch, WatchedPool, WatchedShelf

__all__ = ["PAGE", "RankProcess", "RunContext", "Supervisor"]

PAGE = 4096


class Supervisor(TransferWatch, Protocol):
    """Who starts processes and looks at what they do."""

    def process_ended(self, process: RankProcess, reason: str) -> None:
        """A process is gone."""
        ...

    def file_unlinked(self, process: RankProcess, name: str) -> None:
        """A process is about to remove a file."""
        ...

    def pool_switched(self, rank: int, session: bytes | None) -> None:
        """A rank is in a session of the pool from now on, or in none."""
        ...

    def delivered(self, process: RankProcess, place: int, data: memoryview) -> None:
        """A fetch is about to hand verified bytes to a page or row."""
        ...


@dataclass(slots=True)
class RunContext:
    """What the processes of one run share.

    Attributes:
        slow_disk, slow_device: factors of delays, by rank.
        device_faults: ranks whose device fails at the next transfer.
        pool: the manager of the pool, if there is one.
    """

    run_id: bytes
    options: Options
    settings: CacheSettings
    model: Model
    loop: EventLoop
    rng: Random
    disks: Sequence[SimDisk]
    rates: DiskRates
    exchange: Exchange
    supervisor: Supervisor
    slow_disk: list[float]
    slow_device: list[float]
    device_faults: set[int] = field(default_factory=set)
    pool: SimManager | None = None


class RankProcess:
    """See the module."""

    def __init__(self, context: RunContext, rank: int) -> None:
        self.context = context
        self.rank = rank
        self.name = f"r{rank}"
        self.is_alive = True
        self.is_joined = False
        self.frozen_until = 0.0
        self.links: list[SimLink] = []
        options = context.options
        geometry = context.settings.identity.geometries[rank]
        num_slots = options.max_sequences + (options.num_row_snapshots if options.has_rows else 0)
        self.memory = SimMemory(geometry, num_pages=options.num_pages, num_slots=num_slots)
        self.ledger = Ledger(rank)
        disk = context.disks[rank]
        self.on_step: Callable[[StepResult], None] = _unheard
        self.files = SimFiles(
            disk=disk,
            others=[other for other in context.disks if other is not disk],
            rates=context.rates,
            rng=context.rng,
            clock=context.loop.clock,
            on_unlink=lambda name: context.supervisor.file_unlinked(self, name),
            on_kill=lambda: self.end("killed in a call"),
        )
        self.directory: RecordDirectory | None = None
        self.shelves: dict[Tier, Shelf] = {}
        self.memory_shelf: MemoryShelf | None = None
        self.pool_shelf: SimPoolShelf | None = None
        self.transport: StagedTransport | None = None
        self.num_slots = num_slots
        self.device = Device(
            rank,
            context.model,
            self.memory,
            self.ledger,
            are_jobs_finished=self._are_finished,
            compute_after=lambda call: self.after(self.step_seconds(), self.label_computes, call),
            on_computed=self._computed,
            on_finished=self._step_over,
        )
        self.label_computes = f"{self.name} computes"
        self.label_ends = f"{self.name} ends a step"
        self.label_task = f"{self.name} task"
        self._num_scheduled = 0
        self._num_of_pool = 0

    # -- time ------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, kind: str, call: Callable[[], None]) -> None:
        """Run ``call`` in this process, ``seconds`` from now."""
        loop = self.context.loop
        loop.at(loop.now + seconds, kind, lambda: self._enter(kind, call))

    def _enter(self, kind: str, call: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.frozen_until > self.context.loop.now:
            self.context.loop.at(self.frozen_until, kind, lambda: self._enter(kind, call))
            return
        try:
            call()
        except ProcessKilled:
            self.end("killed in a call")

    def step_seconds(self) -> float:
        """How long half a step takes."""
        context = self.context
        return context.options.step_seconds * (0.1 + context.rng.random()) * context.slow_device[self.rank]

    def end(self, reason: str, *, is_silent: bool = False) -> None:
        """The process is gone; ``is_silent``: and with it its host, so that no connection is closed."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.files.is_dead = True
        self.context.loop.note(f"{self.name} ended: {reason}")
        if not is_silent:
            for link in self.links:
                link.close_silently()
        self.context.supervisor.process_ended(self, reason)

    def exit_within(self, seconds: float, reason: str) -> None:
        """The watchdog ends the process, soon."""
        self.after(seconds * self.context.rng.random(), f"{self.name} exits", lambda: self.end(reason))

    # -- start -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the directory and build shelves and transport. Raises OSError."""
        options, settings = self.context.options, self.context.settings
        # The kernel's lock ended with the process that held it; only its file is here.
        directory = RecordDirectory(
            path=Path(f"/rank{self.rank}"), files=self.files, lock_fd=self.files.open("LOCK", _LOCK_FLAGS)
        )
        directory.sweep_temporaries()
        self.directory = directory
        geometry, fingerprint = settings.identity.geometries[self.rank], settings.identity.fingerprint()
        passage = SimPassage(
            self.memory,
            options.is_staged,
            on_deliver=lambda place, data: self.context.supervisor.delivered(self, place, data),
            is_faulty=self._is_device_faulty,
        )
        disk = DiskShelf(
            directory,
            geometry,
            fingerprint,
            passage,
            direct=False,
            durability=Durability.POWER if options.is_power_durable else Durability.PROCESS,
            part_bytes=options.part_pages * PAGE,
        )
        self.shelves[Tier.DISK] = WatchedShelf(disk, self, self.context.supervisor)
        self._open_pool(disk)
        if settings.memory_bytes is not None:
            self.memory_shelf = MemoryShelf(geometry, fingerprint, passage, settings.memory_bytes)
            self.shelves[Tier.MEMORY] = WatchedShelf(self.memory_shelf, self, self.context.supervisor)

    def _open_pool(self, source: DiskShelf) -> None:
        context = self.context
        if context.pool is None:
            return
        self.pool_shelf = SimPoolShelf(
            pool=context.pool,
            rank=self.rank,
            geometry=context.settings.identity.geometries[self.rank],
            # What comes from the pool lands in staging, whatever the device.
            passage=SimPassage(
                self.memory,
                is_staged=True,
                on_deliver=lambda place, data: context.supervisor.delivered(self, place, data),
                is_faulty=self._is_device_faulty,
            ),
            source=source,
            clock=context.loop.clock,
            part_bytes=context.options.part_pages * PAGE,
            on_switch=context.supervisor.pool_switched,
        )

    def _is_device_faulty(self) -> bool:
        if self.rank in self.context.device_faults:
            self.context.device_faults.discard(self.rank)
            return True
        return False

    def setup(self) -> RankSetup:
        """What the record group is started with."""
        return RankSetup(
            settings=self.context.settings,
            rank=self.rank,
            directory=self.directory,
            make_transport=self._make_transport,
        )

    def _make_transport(
        self, on_result: Callable[[JobResult], None], on_fault: Callable[[str], None]
    ) -> StagedTransport:
        def ended(result: JobResult) -> None:
            on_result(result)
            self.device.advance()

        self.transport = StagedTransport(
            geometry=self.context.settings.identity.geometries[self.rank],
            num_pages=self.context.options.num_pages,
            num_slots=self.num_slots,
            memory=self.memory,
            shelves=self.shelves,
            on_result=ended,
            on_fault=on_fault,
            num_threads=0,
            pool=WatchedPool(self.pool_shelf, self, self.context.supervisor) if self.pool_shelf is not None else None,
            num_pool_threads=0,
            clock=self.context.loop.clock,
        )
        return self.transport

    # -- the transport as rank zero's and a peer's machines see it ---------------------------------------------------

    def submit(self, job: Job) -> None:
        """Take a job. Raises what the transport raises."""
        if self.transport is not None:
            self.transport.submit(job)
            self.pump()

    def step_finished(self, step: int) -> None:
        """A step has ended on this rank."""
        if self.transport is not None:
            self.transport.step_finished(step)
            self.pump()

    def wait_for_jobs(self, jobs: Sequence[int]) -> None:
        """The device waits for them, not the caller."""

    def close(self, deadline_seconds: float) -> bool:
        """Drop what waits; whether nothing runs any more. Who drains comes again later."""
        del deadline_seconds
        if self.transport is None:
            return True
        self.transport.begin_close()
        self.pump()
        return self.transport.num_jobs == 0

    def pump(self) -> None:
        """Give waiting tasks to the threads that are free."""
        transport = self.transport
        if transport is None:
            return
        context = self.context
        while self._num_scheduled < min(context.options.num_threads, transport.num_tasks):
            self._num_scheduled += 1
            seconds = context.options.task_seconds * (0.1 + context.rng.random()) * context.slow_disk[self.rank]
            self.after(seconds, self.label_task, self._run_task)
        while context.pool is not None and self._num_of_pool < min(_POOL_THREADS, transport.num_pool_tasks):
            self._num_of_pool += 1
            self.after(min(context.pool.trip(), _MAX_TRIP_SECONDS), "pool task", self._run_task_of_pool)

    def _run_task(self) -> None:
        self._num_scheduled -= 1
        if self.transport is not None:
            self.transport.run_one()
            self.pump()

    def _run_task_of_pool(self) -> None:
        self._num_of_pool -= 1
        if self.transport is not None:
            self.transport.run_one_of_pool()
            self.pump()

    def _are_finished(self, jobs: Sequence[int]) -> bool:
        return not jobs or (self.transport is not None and self.transport.are_finished(jobs))

    # -- steps -----------------------------------------------------------------------------------------------------

    def _step_over(self, result: StepResult) -> None:
        self.on_step(result)

    def _computed(self, step: int, parts: list[bytes]) -> None:
        """Collectives: the step ends on each rank some time after the last one has computed it."""
        if self.context.exchange.put(step, self.rank, parts):
            self.context.supervisor.step_computed(step)


def _unheard(result: StepResult) -> None:
    raise AssertionError(f"step {result.step} ended before anything ran the rank")


_POOL_THREADS = 2
_MAX_TRIP_SECONDS = 1.0
"""No call on the pool blocks for longer (in a server, two seconds without progress)."""

_LOCK_FLAGS = 0o100 | 0o2
"""O_CREAT | O_RDWR."""
