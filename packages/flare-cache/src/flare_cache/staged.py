"""One rank's executor of jobs: worker threads that run stores, fetches, truncations and unlinks on its shelves.

Submitting never blocks. Jobs start in the order that :class:`flare_cache.job_order.JobOrder` allows; a large one is
split over all threads of its lane, task by task; a simulator runs the same tasks itself. Threads here never enter
torch. Other ranks, records that ought to exist and what follows from a failure are not known here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flare_cache.host_memory import DeviceFault
from flare_cache.job_check import job_problem
from flare_cache.job_order import JobOrder
from flare_cache.job_times import JobTimes
from flare_cache.jobs import Job, JobOp, JobResult, JobStatus
from flare_cache.record import RecordError
from flare_cache.record_file import errno_name
from flare_cache.task_lane import TaskLane
from flare_cache.transfer import Part, PoolPort, Shelf, Transfer
from flare_core.errors import Poisoned
from flare_core.geometry import Geometry
from flare_core.ports import PageMemory
from flare_core.prefix import Tier
from flare_transport.failpoint import failpoint

__all__ = ["DEFAULT_NUM_POOL_THREADS", "DEFAULT_NUM_THREADS", "StagedTransport"]

DEFAULT_NUM_THREADS = 8
DEFAULT_NUM_POOL_THREADS = 4
_ACK_POINTS = {
    JobOp.STORE: "store.ack",
    JobOp.FETCH: "fetch.ack",
    JobOp.TRUNCATE: "truncate.ack",
    JobOp.UNLINK: "unlink.ack",
    JobOp.PUT: "put.ack",
}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A job that may run since ``ready_at``. The fields behind that change under the transport's mutex only."""

    job: Job
    ready_at: float
    started_at: float = 0.0
    transfer: Transfer | None = None
    num_parts_left: int = 0
    failure: JobResult | None = None
    fault: str | None = None


@dataclass(slots=True)
class StagedTransport:
    """Runs jobs on one rank. Thread-safe.

    Attributes:
        geometry: this rank's; every job is checked against it.
        num_pages, num_slots: bounds of page ids and row slots.
        memory: where the pages are; must outlive the threads.
        shelves: by tier; a job on a tier without one fails.
        pool: the pool, for jobs of that tier; None without one.
        on_result: called with the job's result when it has ended, from a worker thread, once for every job; what it
            raises is logged and lost. By then nothing of the job touches pages, slot, file or staging any more.
        on_fault: called with a reason when the device failed: the job in question has no result, never ends, and its
            pages must never be used again. The process has to stop.
        num_threads: disk threads. 4 with parts of 8 MiB keep one NVMe device or one cloud disk busy; with 8 it stays
            busy while some of them compute digests or wait for a core (5 % more on two loaded cores).
        num_pool_threads: threads for the pool's jobs alone, fetches before puts.
        clock: monotonic seconds, for the times of jobs.
    """

    geometry: Geometry
    num_pages: int
    num_slots: int
    memory: PageMemory
    shelves: Mapping[Tier, Shelf]
    on_result: Callable[[JobResult], None]
    on_fault: Callable[[str], None]
    num_threads: int = DEFAULT_NUM_THREADS
    pool: PoolPort | None = None
    num_pool_threads: int = DEFAULT_NUM_POOL_THREADS
    clock: Callable[[], float] = time.monotonic
    times: JobTimes = field(default_factory=JobTimes)
    _order: JobOrder = field(default_factory=JobOrder)
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Condition = field(init=False)
    _lane: TaskLane = field(init=False)
    _pool_lane: TaskLane = field(init=False)
    _closing: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._mutex)
        self._lane = TaskLane("flare-disk", self.num_threads, self._mutex)
        self._pool_lane = TaskLane("flare-pool", self.num_pool_threads if self.pool is not None else 0, self._mutex)

    def start(self) -> None:
        """Start the threads. To be called before the rank joins, so that failing here fails the join.

        Raises:
            RuntimeError: the system gives no thread.
        """
        self._lane.start()
        self._pool_lane.start()

    def submit(self, job: Job) -> None:
        """Take a job; its result comes through ``on_result``. Does not block.

        Raises:
            ValueError: job ids do not rise.
            Poisoned: the transport is closed.
        """
        with self._changed:
            if self._closing:
                raise Poisoned(f"job {job.job_id} after the transport was closed")
            self._enqueue(self._order.add(job))

    def step_finished(self, step: int) -> None:
        """Steps up to ``step`` have finished on this rank's device. Does not block."""
        with self._changed:
            self._enqueue(self._order.step_finished(step))

    def are_finished(self, jobs: Sequence[int]) -> bool:
        """Whether these jobs have arrived and ended on this rank. Does not block."""
        return all(map(self._order.is_finished, jobs))

    def wait_for_jobs(self, jobs: Sequence[int]) -> None:
        """Block until these jobs have arrived and ended on this rank.

        Raises:
            Poisoned: the transport was closed meanwhile.
        """
        with self._changed:
            while not self.are_finished(jobs):
                if self._closing:
                    raise Poisoned("the transport was closed while a step waited for its jobs")
                self._changed.wait()

    @property
    def num_jobs(self) -> int:
        """Jobs that have arrived and not ended."""
        with self._changed:
            return self._order.num_jobs

    def begin_close(self) -> None:
        """Take no more jobs and drop those that wait for a step or a job (they fail). Does not block."""
        with self._changed:
            self._closing = True
            for job in self._order.drop_waiting():
                self._push(job, self._report_task(_failed(job, "closing: the transport was closed first"), job))
            self._changed.notify_all()

    def close(self, deadline_seconds: float) -> bool:
        """Take no more jobs, drop those that wait for a step or a job (they fail), end the others and the threads.

        Returns whether all of it happened within ``deadline_seconds``. If not, some thread still moves bytes: keep
        page memory, shelves and directory as they are until the process ends, and end it with ``os._exit``.
        """
        deadline = time.monotonic() + deadline_seconds
        self.begin_close()
        with self._changed:
            while self._order.num_jobs:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    return False
            self._lane.stop()
            self._pool_lane.stop()
        has_ended = self._lane.join(deadline)
        return self._pool_lane.join(deadline) and has_ended

    # Tasks: small closures ordered by job id, so that a job begun first is ended first.

    def _push(self, job: Job, task: Callable[[], None]) -> None:
        lane = self._pool_lane if job.tier is Tier.POOL and self.pool is not None else self._lane
        lane.push((int(job.op is JobOp.PUT), job.job_id), task)

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._push(job, self._begin_task(_Running(job, self.clock())))

    def _begin_task(self, running: _Running) -> Callable[[], None]:
        return lambda: self._begin(running)

    def _part_task(self, running: _Running, part: Part) -> Callable[[], None]:
        return lambda: self._run_part(running, part)

    def _report_task(self, result: JobResult, job: Job) -> Callable[[], None]:
        return lambda: self._report(job, result)

    @property
    def num_tasks(self) -> int:
        """Tasks on shelves that wait for a thread."""
        return self._lane.num_tasks

    @property
    def num_pool_tasks(self) -> int:
        """Tasks on the pool that wait for a thread."""
        return self._pool_lane.num_tasks

    def run_one(self) -> bool:
        """Run the first task on shelves, in the caller's thread; False when none waits. Blocks for the task."""
        return self._lane.run_one()

    def run_one_of_pool(self) -> bool:
        """As :meth:`run_one`, a task on the pool."""
        return self._pool_lane.run_one()

    def _begin(self, running: _Running) -> None:
        job = running.job
        running.started_at = self.clock()
        problem = job_problem(job, self.geometry, num_pages=self.num_pages, num_slots=self.num_slots)
        is_there = self.pool is not None if job.tier is Tier.POOL else job.tier in self.shelves
        if problem is None and not is_there:
            problem = f"this rank has no {job.tier} tier"
        if problem is not None:
            self._end(running, _failed(job, f"plan: {problem}"))
            return
        try:
            transfer = self._begin_transfer(job, running.ready_at)
        except Exception as error:  # noqa: BLE001 - a worker thread's boundary: the job fails, the thread goes on
            self._end(running, _failure(job, error))
            return
        if isinstance(transfer, int):
            self._end(running, _done(job, transfer))
            return
        running.transfer = transfer
        parts = transfer.parts
        running.num_parts_left = len(parts)
        with self._changed:
            for part in parts[1:]:
                self._push(job, self._part_task(running, part))
        self._run_part(running, parts[0])

    def _begin_transfer(self, job: Job, ready_at: float) -> Transfer | int:
        """What the job moves, or, of a job that moves nothing and is done, the bytes that it gave back."""
        if job.tier is Tier.POOL and self.pool is not None:
            is_put = job.op is JobOp.PUT
            return self.pool.put(job, since=ready_at) if is_put else self.pool.fetch(job, self.memory, since=ready_at)
        shelf = self.shelves[job.tier]
        match job.op:
            case JobOp.STORE:
                return shelf.store(job, self.memory)
            case JobOp.FETCH:
                return shelf.fetch(job, self.memory)
            case JobOp.TRUNCATE:
                return shelf.truncate(job)
            case _:
                return shelf.unlink(job)

    def _run_part(self, running: _Running, part: Part) -> None:
        transfer = running.transfer
        assert transfer is not None  # noqa: S101 - a type's proof: parts exist only where a transfer began
        failure: JobResult | None = None
        fault: str | None = None
        if running.failure is None:
            try:
                transfer.run(part)
            except DeviceFault as error:
                fault = f"device fault in job {running.job.job_id}: {error}"
            except Exception as error:  # noqa: BLE001 - a worker thread's boundary
                failure = _failure(running.job, error)
        with self._changed:
            running.failure = running.failure or failure
            running.fault = running.fault or fault
            running.num_parts_left -= 1
            last = running.num_parts_left == 0
        if fault is not None:
            _log.critical("%s", fault)
            self._call(lambda: self.on_fault(fault))
        elif last and running.fault is None:
            self._end(running, self._conclude(running, transfer))

    def _conclude(self, running: _Running, transfer: Transfer) -> JobResult:
        job, failure = running.job, running.failure
        if failure is None:
            try:
                return _done(job, transfer.finish())
            except Exception as error:  # noqa: BLE001 - a worker thread's boundary
                failure = _failure(job, error)
        if transfer.abandon():
            return failure
        return JobResult(job_id=job.job_id, status=JobStatus.UNCLEAN, reason=failure.reason)

    def _end(self, running: _Running, result: JobResult) -> None:
        self.times.record(running.job.op, result, self.clock() - running.started_at)
        with self._changed:
            self._enqueue(self._order.finished(running.job.job_id))
            self._changed.notify_all()
        self._report(running.job, result)

    def _report(self, job: Job, result: JobResult) -> None:
        if result.status is not JobStatus.OK:
            _log.warning("%s job %d of %s: %s", job.op, job.job_id, job.record.key.hex()[:16], result.reason)
        self._call(lambda: self._answer(job, result))

    def _answer(self, job: Job, result: JobResult) -> None:
        failpoint(_ACK_POINTS[job.op])
        self.on_result(result)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - a worker thread's boundary
            _log.exception("a listener of the staged transport failed")


def _done(job: Job, num_bytes: int) -> JobResult:
    return JobResult(job_id=job.job_id, status=JobStatus.OK, num_bytes=num_bytes)


def _failed(job: Job, reason: str) -> JobResult:
    return JobResult(job_id=job.job_id, status=JobStatus.FAILED, reason=reason)


def _failure(job: Job, error: Exception) -> JobResult:
    match error:
        case RecordError() if job.op is JobOp.FETCH:
            return JobResult(job_id=job.job_id, status=JobStatus.BAD_RECORD, reason=str(error))
        case RecordError():
            return _failed(job, str(error))
        case OSError() if error.errno is None:
            return _failed(job, str(error))
        case OSError():
            return _failed(job, f"{errno_name(error)}: {error.strerror or error}")
    _log.error("job %d failed in a way that was not foreseen", job.job_id, exc_info=error)
    return _failed(job, f"internal: {type(error).__name__}: {error}")
