"""Bugs in how jobs are accounted for: acknowledgements, deadlines, poison, order, and page counts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from flare_cache.dispatcher import Dispatcher
from flare_cache.job_order import JobOrder
from flare_cache.jobs import Job, JobOp, JobResult, JobStatus
from flare_cache.outcomes import Done, Failed, Outcome, RankFailure
from flare_cache.peer_service import PeerService
from flare_cache.record_link import decode_job, encode_job
from flare_cache.sharded import ShardedLeader
from flare_core.engine.page_pool import PagePool
from flare_core.engine.plan_builder import PlanBuilder
from flare_qualify.sim.planted.patching import PlantedBug, exchange
from flare_transport.liveness import Liveness

__all__ = ["JOB_BUGS"]


def _early_report() -> AbstractContextManager[None]:
    account, report = ShardedLeader._account, ShardedLeader._report

    def _account(self: Any, rank: int, result: JobResult, now: float) -> None:
        flight = self._flights[result.job_id]
        account(self, rank, result, now)
        is_nearly = len(flight.results) == len(flight.clocks) - 1
        if is_nearly and flight.job.op is JobOp.STORE and not flight.failures():
            self._report(Done(flight.tag, flight.job, result.num_bytes, dict(flight.seconds)))

    def _report(self: Any, outcome: Outcome) -> None:
        # Once for each job, or the store would stumble over the second.
        told = vars(self).setdefault("_told", set())
        if outcome.job.job_id and outcome.job.job_id in told:
            return
        told.add(outcome.job.job_id)
        report(self, outcome)

    return exchange((ShardedLeader, "_account", _account), (ShardedLeader, "_report", _report))


def _no_undo() -> AbstractContextManager[None]:
    return exchange((ShardedLeader, "_undo", lambda *_: False))


def _undo_after_report() -> AbstractContextManager[None]:
    undo = ShardedLeader._undo

    def _undo(self: Any, flight: Any, now: float) -> bool:
        if undo(self, flight, now):
            self._report(Failed(flight.tag, flight.job, flight.failures(), (), flight.seconds))
        return True

    def _undone(self: Any, undoing: Any, store: Any) -> None:
        del self, undoing, store

    return exchange((ShardedLeader, "_undo", _undo), (ShardedLeader, "_undone", _undone))


def _free_at_deadline() -> AbstractContextManager[None]:
    def tick(self: Any, now: float) -> list[Any]:
        for rank, flight, due_at in list(self._deadlines()):
            if now >= due_at and flight.job.job_id in self._flights:
                del self._flights[flight.job.job_id]
                late = RankFailure(rank, JobStatus.FAILED, "late")
                self._report(Failed(flight.tag, flight.job, (late,), (), flight.seconds))
        effects: list[Any] = self._settle(now)
        return effects

    return exchange((ShardedLeader, "tick", tick))


def _poison_unheard() -> AbstractContextManager[None]:
    def take(self: Any) -> list[Outcome]:
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    return exchange((Dispatcher, "take", take))


def _local_vote() -> AbstractContextManager[None]:
    account = ShardedLeader._account

    def _account(self: Any, rank: int, result: JobResult, now: float) -> None:
        flight = self._flights[result.job_id]
        if rank != 0 and flight.job.op is JobOp.FETCH and result.status is not JobStatus.OK:
            result = JobResult(job_id=result.job_id, status=JobStatus.OK)
        account(self, rank, result, now)

    return exchange((ShardedLeader, "_account", _account))


def _any_run() -> AbstractContextManager[None]:
    clock = ShardedLeader._clock

    def _clock(self: Any, rank: int, what: str, *rest: Any) -> Any:
        _, claimed_rank, job_id = rest
        flight = self._flights.get(job_id)
        if what == "STARTED" and flight is not None and rank in flight.clocks and flight.clocks[rank].is_started:
            return None
        return clock(self, rank, what, self._run_id, claimed_rank, job_id)

    job_came = PeerService._job_came

    def _job_came(self: Any, payload: memoryview) -> None:
        job_came(self, memoryview(encode_job(self._run_id, decode_job(payload).job)))

    return exchange((ShardedLeader, "_clock", _clock), (PeerService, "_job_came", _job_came))


def _any_job_id() -> AbstractContextManager[None]:
    add = JobOrder.add

    def _add(self: Any, job: Job) -> list[Job]:
        if job.job_id <= self.last_job_id:
            # Run under a number of its own: the order itself would stumble.
            job = msgspec.structs.replace(job, job_id=self.last_job_id + 1_000_000)
            highest = self.last_job_id
            started = add(self, job)
            self.last_job_id = highest
            return started
        return add(self, job)

    return exchange((JobOrder, "add", _add))


def _deaf() -> AbstractContextManager[None]:
    return exchange((Liveness, "is_dead", lambda *_: False), (Liveness, "next_timer", lambda self: self._due_at))


def _one_pin() -> AbstractContextManager[None]:
    pin, unpin = PagePool.pin, PagePool.unpin

    def _pin(self: Any, pages: Iterable[int]) -> None:
        pin(self, [page for page in pages if not self._pins[page]])

    def _unpin(self: Any, pages: Iterable[int]) -> list[int]:
        return unpin(self, [page for page in pages if self._pins[page]])

    return exchange((PagePool, "pin", _pin), (PagePool, "unpin", _unpin))


def _at_once() -> AbstractContextManager[None]:
    add = JobOrder.add

    def _add(self: Any, job: Job) -> list[Job]:
        return add(self, msgspec.structs.replace(job, after_step=0))

    return exchange((JobOrder, "add", _add))


def _needs_nothing() -> AbstractContextManager[None]:
    build = PlanBuilder.build

    def _build(self: Any, needs_jobs: Any) -> Any:
        del needs_jobs
        return build(self, ())

    return exchange((PlanBuilder, "build", _build))


JOB_BUGS = (
    PlantedBug(
        "report-before-last-ack", "a job is reported when every rank has answered, not all but one", _early_report
    ),
    PlantedBug("no-undo", "a store that failed on some rank is unlinked where it succeeded", _no_undo),
    PlantedBug("undo-after-report", "the failed store is undone before its failure is reported", _undo_after_report),
    PlantedBug("free-at-deadline", "a job past its deadline poisons; its pages are not given back", _free_at_deadline),
    PlantedBug("report-after-poison", "nothing is reported after a poisoning", _poison_unheard),
    PlantedBug("local-vote", "a fetch counts when every rank has verified it, not rank zero alone", _local_vote),
    PlantedBug("old-run-accepted", "frames of another run are not taken for this one's", _any_run),
    PlantedBug("duplicate-job-accepted", "job ids rise; a job that comes twice is refused", _any_job_id),
    PlantedBug("heartbeats-unchecked", "silence of five seconds is a rank's death", _deaf),
    PlantedBug("one-pin-for-two", "a page stays pinned until the last of its transfers has ended", _one_pin),
    PlantedBug(
        "after-step-ignored", "a copy begins when the step that writes its pages has ended on that rank", _at_once
    ),
    PlantedBug("needs-jobs-ignored", "a step names the jobs whose pages it reads", _needs_nothing),
)
