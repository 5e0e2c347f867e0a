"""Rank zero's half of the sharded transport: one job on every rank, accounted for by a set of ranks.

A state machine: it takes submissions, frames, lost links and the time, and returns effects. It knows no socket, no
thread, no clock and no index. A job's life::

    waiting --credit--> in flight --every rank answered--> Done, or Failed (a store is first undone on its writers)
       |                    |
       +-- Withdrawn        +-- deadline, lost link, or an answer that cannot be --> poisoned

After poisoning every method returns no effects: nothing is reported any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from flare_cache.job_queues import JobQueues, Waiting, credit_of
from flare_cache.jobs import Job, JobOp, JobResult, JobStatus
from flare_cache.outcomes import (
    Done,
    Effect,
    Failed,
    Outcome,
    Poison,
    RankFailure,
    Report,
    RunHere,
    Send,
    ShardedLimits,
    Withdrawal,
    Withdrawn,
)
from flare_cache.record_link import Ack, Started, encode_job
from flare_core.errors import PoisonReason
from flare_core.prefix import Tier

__all__ = ["ShardedLeader"]


@dataclass(slots=True)
class _Clock:
    """One rank's time with one job. ``began_at`` is None until the job may run there: accepted, its step finished."""

    sent_at: float
    is_started: bool = False
    began_at: float | None = None
    allowed_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Flight:
    """A job that ranks work on. ``undoes`` is the failed store that this unlink undoes."""

    tag: int
    job: Job
    num_bytes: int
    clocks: dict[int, _Clock]
    results: dict[int, JobResult] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    undoes: _Flight | None = None

    def failures(self) -> tuple[RankFailure, ...]:
        return tuple(
            RankFailure(rank, result.status, result.reason)
            for rank, result in sorted(self.results.items())
            if result.status is not JobStatus.OK
        )


class ShardedLeader:
    """The machine. Ranks are 0 to ``world_size`` - 1; rank zero is the local one and has no link."""

    def __init__(self, *, run_id: bytes, world_size: int, limits: ShardedLimits) -> None:
        self._run_id = run_id
        self._ranks = range(world_size)
        self._limits = limits
        self._queues = JobQueues(limits)
        self._flights: dict[int, _Flight] = {}
        self._last_job_id = 0
        self._num_undos = 0
        self._last_step = dict.fromkeys(self._ranks, 0)
        self._poisoned: str | None = None
        self._is_poison_told = False
        self._effects: list[Effect] = []

    @property
    def poisoned(self) -> str | None:
        """Why nothing is reported any more, or None."""
        return self._poisoned

    @property
    def num_waiting(self) -> int:
        """Jobs that wait at rank zero for a credit."""
        return len(self._queues)

    @property
    def num_outstanding(self) -> int:
        """Jobs that ranks work on, undoing included."""
        return len(self._flights)

    @property
    def num_undos(self) -> int:
        """Failed stores that had to be unlinked again where they had been written."""
        return self._num_undos

    def submit(
        self, job: Job, *, tag: int, num_bytes: int, now: float, expires_at: float | None = None
    ) -> list[Effect]:
        """Queue a job; its id is assigned when it is sent.

        Args:
            job: with ``job_id`` 0.
            tag: what the outcome carries back.
            num_bytes: bytes that the largest rank moves, for the deadline.
            expires_at: drop it if it has not begun by then.
        """
        self._queues.add(Waiting(tag, job, num_bytes, expires_at))
        return self._settle(now)

    def cancel(self, tag: int, now: float) -> list[Effect]:
        """Withdraw what carries ``tag`` and has not begun."""
        for waiting in self._queues.take_tagged(tag):
            self._report(Withdrawn(waiting.tag, waiting.job, Withdrawal.CANCELLED))
        return self._settle(now)

    def started(self, rank: int, frame: Started, now: float) -> list[Effect]:
        """A STARTED frame came on the link of ``rank``."""
        clock = self._clock(rank, "STARTED", frame.run_id, frame.rank, frame.job_id)
        if clock is not None:
            if clock.is_started:
                self._poison(PoisonReason.PROTOCOL, f"rank {rank} started job {frame.job_id} twice")
            else:
                clock.is_started = True
                self._begin(rank, self._flights[frame.job_id], now)
        return self._settle(now)

    def acked(self, rank: int, frame: Ack, now: float) -> list[Effect]:
        """An acknowledgement came on the link of ``rank``."""
        clock = self._clock(rank, "ACK", frame.run_id, frame.rank, frame.result.job_id)
        if clock is not None:
            if clock.is_started:
                self._account(rank, frame.result, now)
            else:
                text = f"rank {rank} finished job {frame.result.job_id} before it started it"
                self._poison(PoisonReason.PROTOCOL, text)
        return self._settle(now)

    def finished_here(self, result: JobResult, now: float) -> list[Effect]:
        """Rank zero's own transport finished a job."""
        if self._clock(0, "result", self._run_id, 0, result.job_id) is not None:
            self._account(0, result, now)
        return self._settle(now)

    def progressed(self, rank: int, last_step: int, now: float) -> list[Effect]:
        """Steps up to ``last_step`` have finished on the device of ``rank``."""
        self._last_step[rank] = max(self._last_step[rank], last_step)
        for flight in self._flights.values():
            self._begin(rank, flight, now)
        return self._settle(now)

    def link_lost(
        self, rank: int, reason: str, now: float, *, why: PoisonReason = PoisonReason.LINK_LOST
    ) -> list[Effect]:
        """The link of ``rank`` ended, or cannot take a frame: what that rank did can no longer be known."""
        self._poison(why, f"link to rank {rank}: {reason}")
        return self._settle(now)

    def fault(self, reason: str, now: float, *, why: PoisonReason = PoisonReason.DEVICE_FAULT) -> list[Effect]:
        """Rank zero itself can no longer say what it did."""
        self._poison(why, f"rank 0: {reason}")
        return self._settle(now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: drop what waited too long, find who is overdue."""
        for rank, flight, due_at in self._deadlines():
            if now >= due_at:
                clock = flight.clocks[rank]
                what = "answer" if clock.is_started else "start"
                waited = now - clock.sent_at
                text = f"rank {rank} did not {what} {flight.job.op} job {flight.job.job_id} within {waited:.1f} s"
                self._poison(PoisonReason.DEADLINE, text)
                break
        return self._settle(now)

    def next_timer(self) -> float | None:
        """When :meth:`tick` is next needed, or None while nothing waits."""
        times = [due_at for _, _, due_at in self._deadlines()]
        times += [entry.expires_at for entry in self._queues.all() if entry.expires_at is not None]
        return min(times, default=None)

    def _settle(self, now: float) -> list[Effect]:
        """Begin what credits allow, then hand out the effects of this event."""
        if self._poisoned is None:
            for late in self._queues.take_late(now):
                self._report(Withdrawn(late.tag, late.job, Withdrawal.LATE))
            while (waiting := self._queues.next(self._num_outstanding_by_credit())) is not None:
                self._launch(waiting, now)
        effects, self._effects = self._effects, []
        if self._poisoned is None:
            return effects
        is_news, self._is_poison_told = not self._is_poison_told, True
        return effects if is_news else []

    def _num_outstanding_by_credit(self) -> Counter[str]:
        return Counter(credit_of(flight.job) for flight in self._flights.values())

    def _launch(self, waiting: Waiting, now: float) -> None:
        job = msgspec.structs.replace(waiting.job, job_id=self._last_job_id + 1)
        payload = encode_job(self._run_id, job)
        if len(payload) > self._limits.max_frame_bytes:
            self._report(Withdrawn(waiting.tag, waiting.job, Withdrawal.TOO_LARGE))
            return
        self._send(_Flight(waiting.tag, job, waiting.num_bytes, self._clocks(self._ranks, now)), payload, now)

    def _clocks(self, ranks: range | list[int], now: float) -> dict[int, _Clock]:
        return {rank: _Clock(now, is_started=rank == 0) for rank in ranks}

    def _send(self, flight: _Flight, payload: bytes, now: float) -> None:
        self._last_job_id = flight.job.job_id
        self._flights[flight.job.job_id] = flight
        # Peers first: their frames travel while rank zero begins.
        self._effects += [Send(rank, payload) for rank in flight.clocks if rank != 0]
        if 0 in flight.clocks:
            self._effects.append(RunHere(flight.job))
            self._begin(0, flight, now)

    def _begin(self, rank: int, flight: _Flight, now: float) -> None:
        """Start the clock of a rank that has accepted the job and finished the step it waits for."""
        clock = flight.clocks.get(rank)
        if clock is None or not clock.is_started or clock.began_at is not None or rank in flight.results:
            return
        if flight.job.after_step > self._last_step[rank]:
            return
        is_pool = flight.job.tier is Tier.POOL
        given = sum(
            other.num_bytes
            for other in self._flights.values()
            if (other.job.tier is Tier.POOL) is is_pool and rank in other.clocks and rank not in other.results
        )
        limits = self._limits
        clock.began_at = now
        clock.allowed_seconds = min(limits.max_job_seconds, limits.base_seconds + given / limits.floor_bytes_per_second)

    def _deadlines(self) -> Iterator[tuple[int, _Flight, float]]:
        for flight in self._flights.values():
            for rank, clock in flight.clocks.items():
                if rank in flight.results:
                    continue
                if not clock.is_started:
                    yield rank, flight, clock.sent_at + self._limits.started_seconds
                elif clock.began_at is not None:
                    yield rank, flight, clock.began_at + clock.allowed_seconds

    def _clock(self, rank: int, what: str, run_id: bytes, claimed_rank: int, job_id: int) -> _Clock | None:
        """The clock that an answer belongs to; poisons when the answer cannot be."""
        flight = self._flights.get(job_id)
        if run_id != self._run_id:
            problem = f"of another run ({run_id.hex()})"
        elif claimed_rank != rank:
            problem = f"in the name of rank {claimed_rank}"
        elif flight is None:
            problem = f"of job {job_id}, which no rank works on"
        elif rank not in flight.clocks:
            problem = f"of job {job_id}, which it was not given"
        elif rank in flight.results:
            problem = f"of job {job_id} after it had answered"
        else:
            return flight.clocks[rank]
        self._poison(PoisonReason.PROTOCOL, f"rank {rank} sent {what} {problem}")
        return None

    def _account(self, rank: int, result: JobResult, now: float) -> None:
        flight = self._flights[result.job_id]
        flight.results[rank] = result
        flight.seconds[rank] = now - flight.clocks[rank].sent_at
        if len(flight.results) < len(flight.clocks):
            return
        del self._flights[result.job_id]
        if flight.undoes is not None:
            self._undone(flight, flight.undoes)
            return
        failures = flight.failures()
        if not failures:
            num_bytes = max(answer.num_bytes for answer in flight.results.values())
            self._report(Done(flight.tag, flight.job, num_bytes, flight.seconds))
        elif flight.job.op is JobOp.STORE and self._undo(flight, now):
            return
        else:
            self._report(Failed(flight.tag, flight.job, failures, (), flight.seconds))

    def _undo(self, flight: _Flight, now: float) -> bool:
        """Unlink a store from those that wrote it, or could not remove what they wrote; False if there are none."""
        holding = (JobStatus.OK, JobStatus.UNCLEAN)
        writers = [rank for rank, result in sorted(flight.results.items()) if result.status in holding]
        if not writers:
            return False
        job = Job(job_id=self._last_job_id + 1, op=JobOp.UNLINK, tier=flight.job.tier, record=flight.job.record)
        self._num_undos += 1
        undoing = _Flight(flight.tag, job, 0, self._clocks(writers, now), undoes=flight)
        self._send(undoing, encode_job(self._run_id, job), now)
        return True

    def _undone(self, undoing: _Flight, store: _Flight) -> None:
        """Report the failed store together with what could not be removed.

        A record is visible only where every rank holds it. It is enough, therefore, that one rank has confirmed that
        it holds nothing; when none has, a later join might find the record whole.
        """
        cleanup = undoing.failures()
        if len(cleanup) == len(store.clocks):
            names = ", ".join(f"rank {failure.rank}: {failure.reason}" for failure in cleanup)
            text = f"a failed store of {store.job.record.key.hex()} could not be undone anywhere ({names})"
            self._poison(PoisonReason.UNDO_FAILED, text)
            return
        self._report(Failed(store.tag, store.job, store.failures(), cleanup, store.seconds))

    def _report(self, outcome: Outcome) -> None:
        if self._poisoned is None:
            self._effects.append(Report(outcome))

    def _poison(self, why: PoisonReason, text: str) -> None:
        if self._poisoned is None:
            self._poisoned = f"{why}: {text}"
            self._effects.append(Poison(self._poisoned))
