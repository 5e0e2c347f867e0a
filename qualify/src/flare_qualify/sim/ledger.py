"""Who may read or write each page and row of one rank, until when: the device's step, and the transfers under way.

A step holds what it reads and writes from its launch to its end on this rank's device; a job from its first task to its
last. Two holders of which one writes are a violation, whoever is faster. Knows no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flare_cache.jobs import Job, JobOp
from flare_qualify.sim.loop import Violation

__all__ = ["Ledger", "Place", "StepUse", "job_places", "row_place"]

Place = int
"""A page's id, or -1 - slot for a row."""


def row_place(slot: int) -> Place:
    """The row of ``slot``."""
    return -1 - slot


def job_places(job: Job) -> list[Place]:
    """What a job reads or writes on a rank."""
    places = [section.page for section in job.sections]
    if job.row_slot is not None:
        places.append(row_place(job.row_slot))
    return places


@dataclass(frozen=True, slots=True)
class StepUse:
    """What a step does: places read, places written, and those written from their beginning."""

    step: int
    reads: frozenset[Place]
    writes: frozenset[Place]
    begun: frozenset[Place]


@dataclass(slots=True)
class Ledger:
    """One rank's, from its start to its end."""

    rank: int
    step: StepUse | None = None
    jobs: dict[int, Job] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)
    restored_by: dict[Place, int] = field(default_factory=dict)
    _readers: dict[Place, int] = field(default_factory=dict)
    _writers: dict[Place, int] = field(default_factory=dict)

    def step_begins(self, use: StepUse, needs_jobs: Iterable[int]) -> None:
        """A step is launched."""
        self.needed.update(needs_jobs)
        for place in use.writes:
            job_id = self._writers.get(place) or self._readers.get(place)
            if job_id:
                self._clash(f"step {use.step} writes", place, job_id)
        for place in use.reads:
            job_id = self._writers.get(place)
            if job_id:
                self._clash(f"step {use.step} reads", place, job_id)
        restored_by = self.restored_by
        if restored_by:
            for place in use.begun:
                restored_by.pop(place, None)
            for place in use.reads:
                restorer = restored_by.get(place)
                if restorer is not None and restorer not in self.needed:
                    raise Violation(
                        "needs_jobs",
                        f"rank {self.rank}: step {use.step} reads {_name(place)} without needing job {restorer}",
                    )
        self.step = use

    def step_ends(self) -> None:
        """The step has finished on this rank's device."""
        self.step = None

    def job_begins(self, job: Job) -> None:
        """A job's first task runs."""
        if job.job_id in self.jobs:
            raise Violation("job ids", f"rank {self.rank}: job {job.job_id} runs twice at once")
        is_store = job.op is JobOp.STORE
        for place in job_places(job):
            step = self.step
            if step is not None and (place in step.writes or (not is_store and place in step.reads)):
                self._clash(f"step {step.step} uses", place, job.job_id)
            other = self._writers.get(place) or (0 if is_store else self._readers.get(place))
            if other:
                self._clash(f"job {other} uses", place, job.job_id)
            (self._readers if is_store else self._writers)[place] = job.job_id
        self.jobs[job.job_id] = job

    def job_ends(self, job: Job, *, is_ok: bool) -> None:
        """A job's last task has run."""
        del self.jobs[job.job_id]
        for held in (self._readers, self._writers):
            for place in job_places(job):
                if held.get(place) == job.job_id:
                    del held[place]
        if job.op is JobOp.FETCH:
            for place in job_places(job):
                if is_ok:
                    self.restored_by[place] = job.job_id
                else:
                    self.restored_by.pop(place, None)

    def writer_of(self, place: Place) -> int:
        """The fetch under way that writes it, or 0."""
        return self._writers.get(place, 0)

    def holds(self, place: Place) -> bool:
        """A transfer under way touches it."""
        return place in self._readers or place in self._writers

    def _clash(self, what: str, place: Place, job_id: int) -> None:
        raise Violation("page ledger", f"rank {self.rank}: {what} {_name(place)} of job {job_id}, which is under way")


def _name(place: Place) -> str:
    return f"page {place}" if place >= 0 else f"row {-1 - place}"
