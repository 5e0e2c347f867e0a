"""Which job may start now: the order of jobs on one rank, as a pure machine.

A job starts when its ``after_step`` has finished and no earlier job that names the same record, page or row slot is
left; the pool's records are no names. No clock, no thread: the staged transport and the simulator feed it events and
get the jobs to start.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from flare_cache.jobs import Job
from flare_core.prefix import Tier

__all__ = ["JobOrder"]


def _names(job: Job) -> set[Hashable]:
    """What the job excludes others from.

    What is in the pool never changes, and a put reads a record that is pinned: neither excludes anyone from a record.
    """
    names: set[Hashable] = set() if job.tier is Tier.POOL else {("record", job.tier, job.record.key)}
    names.update(("page", section.page) for section in job.sections)
    if job.row_slot is not None:
        names.add(("row", job.row_slot))
    return names


@dataclass(slots=True)
class _Entry:
    job: Job
    names: set[Hashable]
    num_blockers: int
    started: bool = False


@dataclass(slots=True)
class JobOrder:
    """Jobs not finished yet. Every method returns the jobs that may start now, in job-id order.

    Attributes:
        last_step: the last finished step; jobs with ``after_step`` up to it do not wait.
        last_job_id: the last added job.
    """

    last_step: int = 0
    last_job_id: int = 0
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _queues: dict[Hashable, deque[int]] = field(default_factory=dict)
    _steps: list[tuple[int, int]] = field(default_factory=list)

    def add(self, job: Job) -> list[Job]:
        """A job has arrived.

        Raises:
            ValueError: job ids do not rise.
        """
        if job.job_id <= self.last_job_id:
            raise ValueError(f"job {job.job_id} after job {self.last_job_id}")
        self.last_job_id = job.job_id
        entry = _Entry(job, _names(job), 0)
        self._entries[job.job_id] = entry
        for name in entry.names:
            queue = self._queues.setdefault(name, deque())
            entry.num_blockers += bool(queue)
            queue.append(job.job_id)
        if job.after_step > self.last_step:
            entry.num_blockers += 1
            heapq.heappush(self._steps, (job.after_step, job.job_id))
        return self._start([job.job_id])

    def step_finished(self, step: int) -> list[Job]:
        """Steps up to ``step`` have finished on this rank's device."""
        self.last_step = max(self.last_step, step)
        freed: list[int] = []
        while self._steps and self._steps[0][0] <= self.last_step:
            job_id = heapq.heappop(self._steps)[1]
            if job_id in self._entries:
                self._entries[job_id].num_blockers -= 1
                freed.append(job_id)
        return self._start(freed)

    def finished(self, job_id: int) -> list[Job]:
        """A started job has ended on this rank, whatever became of it."""
        freed: list[int] = []
        for name in self._entries.pop(job_id).names:
            queue = self._queues[name]
            queue.popleft()
            if queue:
                self._entries[queue[0]].num_blockers -= 1
                freed.append(queue[0])
            else:
                del self._queues[name]
        return self._start(freed)

    def drop_waiting(self) -> list[Job]:
        """Forget every job that has not been started; they are returned and nothing of them will start."""
        dropped = [entry.job for entry in self._entries.values() if not entry.started]
        for job in dropped:
            for name in self._entries.pop(job.job_id).names:
                queue = self._queues[name]
                queue.remove(job.job_id)
                if not queue:
                    del self._queues[name]
        return dropped

    def is_finished(self, job_id: int) -> bool:
        """The job was added and has ended, or was never to be (ids rise)."""
        return job_id <= self.last_job_id and job_id not in self._entries

    @property
    def num_jobs(self) -> int:
        """Jobs added and not ended."""
        return len(self._entries)

    def _start(self, job_ids: Iterable[int]) -> list[Job]:
        ready: list[Job] = []
        for job_id in sorted(set(job_ids)):
            entry = self._entries[job_id]
            if not entry.num_blockers and not entry.started:
                entry.started = True
                ready.append(entry.job)
        return ready
