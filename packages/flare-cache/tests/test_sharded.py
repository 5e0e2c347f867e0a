"""The leader's machine, driven by hand: who must answer, what is undone, and what poisons."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.jobs import Job, JobOp, JobResult, JobStatus, RecordIdentity, Section
from flare_cache.outcomes import (
    Done,
    Failed,
    Poison,
    RankFailure,
    Report,
    RunHere,
    Send,
    ShardedLimits,
    Withdrawal,
    Withdrawn,
)
from flare_cache.record_link import Ack, Started, decode_job
from flare_cache.sharded import ShardedLeader
from flare_core.prefix import Tier

RUN = b"run-one-16-bytes"
IDENTITY = RecordIdentity(
    key=bytes(32), store_id=bytes(16), parent_key=b"", start_key=bytes(32), start=0, end=4, page_tokens=4,
    tail_tokens=0, has_row=False,
)  # fmt: skip


def job(op: JobOp = JobOp.STORE, *, after_step: int = 0, tier: Tier = Tier.DISK) -> Job:
    sections = (Section(0, 5),) if op in (JobOp.STORE, JobOp.FETCH) else ()
    token_ids = bytes(16) if op is JobOp.STORE else b""
    tier = Tier.POOL if op is JobOp.PUT else tier
    return Job(
        job_id=0, op=op, tier=tier, record=IDENTITY, after_step=after_step, sections=sections, token_ids=token_ids
    )


class Leader:
    """The machine with a clock, and its effects collected by kind."""

    def __init__(self, world_size: int = 3, **limits) -> None:
        self.machine = ShardedLeader(run_id=RUN, world_size=world_size, limits=ShardedLimits(**limits))
        self.now = 100.0
        self.sent: list[tuple[int, Job]] = []
        self.here: list[Job] = []
        self.outcomes: list = []
        self.poisons: list[str] = []

    def take(self, effects) -> None:
        for effect in effects:
            match effect:
                case Send(rank, payload):
                    frame = decode_job(payload)
                    assert frame.run_id == RUN
                    self.sent.append((rank, frame.job))
                case RunHere(local):
                    self.here.append(local)
                case Report(outcome):
                    self.outcomes.append(outcome)
                case Poison(reason):
                    self.poisons.append(reason)

    def submit(
        self, op: JobOp = JobOp.STORE, *, tag: int = 1, num_bytes: int = 0, after_step: int = 0, expires_at=None,
        tier: Tier = Tier.DISK,
    ):  # fmt: skip
        one = job(op, after_step=after_step, tier=tier)
        self.take(self.machine.submit(one, tag=tag, num_bytes=num_bytes, now=self.now, expires_at=expires_at))

    def start(self, rank: int, job_id: int = 1, *, run_id: bytes = RUN, claimed: int | None = None) -> None:
        frame = Started(run_id, rank if claimed is None else claimed, job_id)
        self.take(self.machine.started(rank, frame, self.now))

    def ack(self, rank: int, job_id: int = 1, status=JobStatus.OK, *, run_id: bytes = RUN, claimed=None) -> None:
        result = JobResult(job_id=job_id, status=status, num_bytes=10 + rank, reason="" if status == "ok" else "disk")
        frame = Ack(run_id, rank if claimed is None else claimed, result)
        self.take(self.machine.acked(rank, frame, self.now))

    def answer(self, rank: int, job_id: int = 1, status=JobStatus.OK) -> None:
        if rank == 0:
            result = JobResult(job_id=job_id, status=status, num_bytes=10, reason="" if status == "ok" else "disk")
            self.take(self.machine.finished_here(result, self.now))
        else:
            self.start(rank, job_id)
            self.ack(rank, job_id, status)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.machine.tick(self.now))


def test_the_same_job_goes_to_every_rank_and_is_done_when_all_have_finished():
    leader = Leader()
    leader.submit()
    assert [rank for rank, _ in leader.sent] == [1, 2]
    assert {sent.job_id for _, sent in leader.sent} | {local.job_id for local in leader.here} == {1}
    leader.answer(2)
    leader.answer(0)
    assert leader.outcomes == []
    leader.answer(1)
    (done,) = leader.outcomes
    assert isinstance(done, Done)
    assert (done.tag, done.num_bytes, sorted(done.seconds)) == (1, 12, [0, 1, 2])


def test_one_rank_alone_uses_the_same_machine():
    leader = Leader(world_size=1)
    leader.submit(JobOp.FETCH)
    leader.answer(0)
    assert [type(outcome) for outcome in leader.outcomes] == [Done]


def test_job_ids_rise_in_the_order_of_sending_and_restores_overtake_waiting_stores():
    leader = Leader(max_outstanding=1)
    leader.submit(tag=1)
    leader.submit(tag=2)
    leader.submit(JobOp.UNLINK, tag=3)
    leader.submit(JobOp.FETCH, tag=4)
    assert (leader.machine.num_waiting, leader.machine.num_outstanding) == (3, 1)
    for job_id in range(1, 5):
        for rank in range(3):
            leader.answer(rank, job_id)
    assert [outcome.tag for outcome in leader.outcomes] == [1, 4, 3, 2]
    assert [local.job_id for local in leader.here] == [1, 2, 3, 4]


def test_a_failed_store_is_unlinked_from_its_writers_before_it_is_reported():
    leader = Leader()
    leader.submit()
    leader.answer(0)
    leader.answer(1, status=JobStatus.FAILED)
    leader.answer(2)
    assert leader.outcomes == []
    assert [(rank, sent.op, sent.job_id) for rank, sent in leader.sent[2:]] == [(2, JobOp.UNLINK, 2)]
    assert [local.op for local in leader.here] == [JobOp.STORE, JobOp.UNLINK]
    leader.answer(0, 2)
    leader.answer(2, 2)
    (failed,) = leader.outcomes
    assert failed.failures == (RankFailure(1, JobStatus.FAILED, "disk"),)
    assert failed.cleanup == ()
    assert leader.poisons == []


def test_a_store_that_no_rank_wrote_is_reported_at_once():
    leader = Leader(world_size=2)
    leader.submit()
    leader.answer(0, status=JobStatus.FAILED)
    leader.answer(1, status=JobStatus.FAILED)
    assert [len(outcome.failures) for outcome in leader.outcomes] == [2]
    assert len(leader.here) == 1


def test_a_failed_cleanup_is_reported_together_with_the_failure():
    leader = Leader()
    leader.submit()
    leader.answer(0)
    leader.answer(1, status=JobStatus.UNCLEAN)
    leader.answer(2, status=JobStatus.FAILED)
    leader.answer(0, 2)
    leader.answer(1, 2, JobStatus.FAILED)
    (failed,) = leader.outcomes
    assert [failure.rank for failure in failed.failures] == [1, 2]
    assert failed.cleanup == (RankFailure(1, JobStatus.FAILED, "disk"),)
    assert leader.poisons == []


def test_a_store_that_no_rank_could_remove_poisons():
    leader = Leader(world_size=2)
    leader.submit()
    leader.answer(0)
    leader.answer(1, status=JobStatus.UNCLEAN)
    leader.answer(0, 2, JobStatus.FAILED)
    leader.answer(1, 2, JobStatus.FAILED)
    assert leader.outcomes == []
    assert len(leader.poisons) == 1
    assert "rank 0: disk, rank 1: disk" in leader.poisons[0]


def test_a_failed_fetch_is_reported_with_the_rank_and_the_reason():
    leader = Leader()
    leader.submit(JobOp.FETCH)
    leader.answer(0)
    leader.answer(1)
    leader.answer(2, status=JobStatus.BAD_RECORD)
    (failed,) = leader.outcomes
    assert isinstance(failed, Failed)
    assert failed.failures == (RankFailure(2, JobStatus.BAD_RECORD, "disk"),)
    assert len(leader.here) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda leader: leader.start(1, run_id=b"another-run-1234"), "another run"),
        (lambda leader: leader.ack(1, run_id=b"another-run-1234"), "another run"),
        (lambda leader: leader.start(1, 77), "which no rank works on"),
        (lambda leader: leader.ack(1, 77), "which no rank works on"),
        (lambda leader: leader.start(1, claimed=2), "in the name of rank 2"),
        (lambda leader: leader.ack(1, claimed=2), "in the name of rank 2"),
        (lambda leader: (leader.start(1), leader.start(1)), "twice"),
        (lambda leader: leader.ack(1), "before it started it"),
        (lambda leader: (leader.answer(1), leader.ack(1)), "after it had answered"),
        (lambda leader: (leader.answer(1), leader.start(1)), "after it had answered"),
        (lambda leader: (leader.answer(0), leader.answer(0)), "after it had answered"),
        (lambda leader: leader.take(leader.machine.link_lost(1, "reset", leader.now)), "link to rank 1: reset"),
        (lambda leader: leader.take(leader.machine.fault("disk threads", leader.now)), "rank 0: disk threads"),
    ],
)
def test_an_answer_that_cannot_be_poisons_and_nothing_is_reported_any_more(answer, message):
    leader = Leader()
    leader.submit()
    answer(leader)
    assert len(leader.poisons) == 1
    assert message in leader.poisons[0]
    assert message in leader.machine.poisoned
    for rank in range(3):
        leader.answer(rank)
    leader.submit(tag=2)
    leader.take(leader.machine.cancel(2, leader.now))
    leader.advance(1000)
    assert leader.outcomes == []
    assert len(leader.poisons) == 1
    assert len(leader.here) == 1


def test_an_undo_may_not_be_answered_by_a_rank_that_wrote_nothing():
    leader = Leader()
    leader.submit()
    leader.answer(0)
    leader.answer(1)
    leader.answer(2, status=JobStatus.FAILED)
    leader.start(2, 2)
    assert "which it was not given" in leader.poisons[0]


def test_a_peer_must_accept_a_job_within_the_start_deadline():
    leader = Leader()
    leader.submit()
    leader.start(1)
    assert leader.machine.next_timer() == pytest.approx(105.0)
    leader.answer(0)
    leader.ack(1)
    leader.advance(9.9)
    assert leader.poisons == []
    leader.advance(0.2)
    assert "rank 2 did not start store job 1" in leader.poisons[0]


def test_the_deadline_counts_all_bytes_that_the_rank_was_given():
    leader = Leader(world_size=2)
    leader.submit(num_bytes=20_000_000)
    leader.submit(num_bytes=40_000_000, tag=2)
    leader.start(1)
    leader.start(1, 2)
    for job_id in (1, 2):
        leader.answer(0, job_id)
    leader.advance(7.9)
    assert leader.poisons == []
    leader.advance(0.2)
    assert "rank 1 did not answer store job 1" in leader.poisons[0]


def test_the_deadline_is_capped():
    leader = Leader(world_size=1)
    leader.submit(num_bytes=10**12)
    leader.advance(119)
    assert leader.poisons == []
    leader.advance(2)
    assert len(leader.poisons) == 1


def test_a_job_that_waits_for_a_step_has_no_deadline_until_the_step_has_finished():
    leader = Leader(world_size=2)
    leader.submit(after_step=7)
    leader.start(1)
    leader.advance(1000)
    leader.take(leader.machine.progressed(0, 7, leader.now))
    leader.answer(0)
    leader.take(leader.machine.progressed(1, 6, leader.now))
    leader.advance(1000)
    assert leader.poisons == []
    leader.take(leader.machine.progressed(1, 9, leader.now))
    leader.take(leader.machine.progressed(1, 10, leader.now + 4))
    leader.advance(5.1)
    assert "rank 1 did not answer" in leader.poisons[0]


def test_what_waits_can_be_cancelled_and_what_began_cannot():
    leader = Leader(max_outstanding=1)
    leader.submit(JobOp.FETCH, tag=1)
    leader.submit(JobOp.FETCH, tag=2)
    leader.submit(JobOp.FETCH, tag=2)
    leader.take(leader.machine.cancel(1, leader.now))
    leader.take(leader.machine.cancel(2, leader.now))
    assert [(outcome.tag, outcome.reason) for outcome in leader.outcomes] == [(2, Withdrawal.CANCELLED)] * 2
    for rank in range(3):
        leader.answer(rank)
    assert [type(outcome) for outcome in leader.outcomes] == [Withdrawn, Withdrawn, Done]


def test_a_store_that_waits_too_long_is_dropped_and_others_wait_on():
    leader = Leader(max_outstanding=1, max_job_seconds=1e9, base_seconds=1e9, started_seconds=1e9)
    leader.submit(tag=1)
    leader.submit(tag=2, expires_at=leader.now + 5)
    leader.submit(tag=3)
    assert leader.machine.next_timer() == leader.now + 5
    leader.advance(4.9)
    assert leader.outcomes == []
    leader.advance(0.2)
    assert [(outcome.tag, outcome.reason) for outcome in leader.outcomes] == [(2, Withdrawal.LATE)]
    assert leader.machine.num_waiting == 1


def test_a_job_over_the_frame_limit_fails_before_any_rank_begins():
    leader = Leader(max_frame_bytes=100)
    leader.submit()
    assert (leader.sent, leader.here) == ([], [])
    assert [outcome.reason for outcome in leader.outcomes] == [Withdrawal.TOO_LARGE]


def test_jobs_of_the_pool_take_no_credit_from_a_disk_nor_puts_from_fetches():
    leader = Leader(1, max_outstanding=1, max_pool_fetches=1, max_pool_puts=1)
    for tag in range(2):
        leader.submit(JobOp.PUT, tag=tag)
        leader.submit(JobOp.FETCH, tier=Tier.POOL, tag=10 + tag)
        leader.submit(JobOp.FETCH, tag=20 + tag)
    assert [(one.op, one.tier) for one in leader.here] == [
        (JobOp.PUT, Tier.POOL), (JobOp.FETCH, Tier.POOL), (JobOp.FETCH, Tier.DISK)
    ]  # fmt: skip
    assert leader.machine.num_waiting == 3
    leader.answer(0, 1)
    assert leader.here[-1].op is JobOp.PUT


def test_a_failed_put_is_reported_and_nothing_is_undone():
    leader = Leader(2)
    leader.submit(JobOp.PUT)
    leader.answer(0, 1, JobStatus.FAILED)
    leader.answer(1, 1)
    (outcome,) = leader.outcomes
    assert isinstance(outcome, Failed)
    assert leader.machine.num_undos == 0


def test_bytes_given_to_the_pool_give_a_disk_job_no_more_time():
    leader = Leader(1, base_seconds=1.0, floor_bytes_per_second=100.0)
    leader.submit(JobOp.PUT, num_bytes=1_000, tag=1)
    leader.submit(JobOp.FETCH, num_bytes=100, tag=2)
    assert leader.machine.next_timer() == leader.now + 2.0


def test_nothing_is_due_when_nothing_waits():
    assert Leader().machine.next_timer() is None


STATUSES = {
    JobOp.STORE: [JobStatus.OK, JobStatus.FAILED, JobStatus.UNCLEAN],
    JobOp.FETCH: [JobStatus.OK, JobStatus.FAILED, JobStatus.BAD_RECORD],
    JobOp.TRUNCATE: [JobStatus.OK, JobStatus.FAILED],
    JobOp.UNLINK: [JobStatus.OK, JobStatus.FAILED],
    JobOp.PUT: [JobStatus.OK, JobStatus.FAILED],
}


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_every_job_is_reported_once_and_only_when_every_rank_is_accounted_for(data, world_size, credit):
    leader = Leader(world_size, max_outstanding=credit)
    for tag in range(data.draw(st.integers(1, 6))):
        leader.submit(data.draw(st.sampled_from(list(JobOp))), tag=tag)
    num_submitted = leader.machine.num_waiting + leader.machine.num_outstanding
    held: dict[int, dict[int, JobStatus]] = {}
    given_jobs: list[tuple[int, Job]] = []
    answered: set[tuple[int, int]] = set()
    while True:
        given_jobs = [*leader.sent, *[(0, local) for local in leader.here]]
        open_jobs = [entry for entry in given_jobs if (entry[0], entry[1].job_id) not in answered]
        if not open_jobs or leader.poisons:
            break
        rank, current = data.draw(st.sampled_from(sorted(open_jobs, key=lambda entry: (entry[1].job_id, entry[0]))))
        status = data.draw(st.sampled_from(STATUSES[current.op]))
        answered.add((rank, current.job_id))
        held.setdefault(current.job_id, {})[rank] = status
        leader.answer(rank, current.job_id, status)
    tags = [outcome.tag for outcome in leader.outcomes]
    assert len(tags) == len(set(tags))
    for outcome in leader.outcomes:
        answers = held[outcome.job.job_id]
        assert set(answers) == set(range(world_size))
        assert isinstance(outcome, Done) == all(status is JobStatus.OK for status in answers.values())
    if not leader.poisons:
        assert len(tags) == num_submitted
        assert (leader.machine.num_waiting, leader.machine.num_outstanding) == (0, 0)
