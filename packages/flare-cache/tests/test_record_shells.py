"""The thread shells at both ends of the record link, fed with frames: what is refused, and who is told."""

from __future__ import annotations

import threading

import pytest

from flare_cache.dispatcher import Dispatcher
from flare_cache.jobs import Job, JobOp, JobResult, JobStatus, RecordIdentity, Section
from flare_cache.outcomes import Done, ShardedLimits
from flare_cache.peer_service import PeerService, ServiceEnd
from flare_cache.record_link import (
    MAX_REASON_CHARACTERS,
    RECORD_ACK,
    RECORD_JOB,
    RECORD_STARTED,
    Ack,
    Progress,
    Started,
    decode_ack,
    decode_progress,
    decode_started,
    encode_ack,
    encode_job,
    encode_progress,
    encode_started,
)
from flare_cache.sharded import ShardedLeader
from flare_cache.turnstile import Turnstile
from flare_core.errors import Poisoned, PoisonReason, poison_reason
from flare_core.prefix import Tier
from flare_transport.errors import QueueFull
from flare_transport.frame_types import HEARTBEAT
from flare_transport.framing import Frame
from flare_transport.router import EndCause, LinkEnd, Router

RUN = b"run-one-16-bytes"
IDENTITY = RecordIdentity(
    key=bytes(32), store_id=bytes(16), parent_key=b"", start_key=bytes(32), start=0, end=4, page_tokens=4,
    tail_tokens=0, has_row=False,
)  # fmt: skip
JOB = Job(job_id=0, op=JobOp.FETCH, tier=Tier.DISK, record=IDENTITY, sections=(Section(0, 1),))


class Wire:
    """A link that notes what it is told; frames from the other side go through its router."""

    def __init__(self) -> None:
        self.router = Router()
        self.sent: list[tuple[object, bytes]] = []
        self.failed: list[str] = []
        self.is_shut = False
        self.is_full = False

    def send(self, frame_type, payload=b"") -> None:
        if self.is_full:
            raise QueueFull("frames wait to be sent")
        self.sent.append((frame_type, bytes(payload)))

    def shutdown(self) -> None:
        self.is_shut = True

    def fail(self, reason: str) -> None:
        self.failed.append(reason)

    def deliver(self, frame_type, payload: bytes) -> None:
        self.router.deliver(None, Frame(frame_type, memoryview(payload)))

    def end(self, cause: EndCause = EndCause.DISCONNECTED) -> None:
        self.router.ended(None, LinkEnd(cause, "the wire was cut"))


class Transport:
    """A local transport that notes jobs; ``refuses`` makes it raise."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.steps: list[int] = []
        self.waited: list[list[int]] = []
        self.refuses: Exception | None = None
        self.drains = True
        self.num_closed = 0

    def submit(self, job: Job) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.jobs.append(job)

    def step_finished(self, step: int) -> None:
        self.steps.append(step)

    def wait_for_jobs(self, jobs) -> None:
        self.waited.append(list(jobs))

    def close(self, deadline_seconds: float) -> bool:
        self.num_closed += 1
        return self.drains


class RankZero:
    """A dispatcher with one peer on a wire."""

    def __init__(self, *, is_started: bool = True, **limits) -> None:
        self.poisons: list[str] = []
        self.woken = threading.Event()
        machine = ShardedLeader(run_id=RUN, world_size=2, limits=ShardedLimits(**limits))
        self.dispatcher = Dispatcher(machine, on_outcome=self.woken.set, on_poison=self.poisons.append)
        self.wire, self.transport = Wire(), Transport()
        self.dispatcher.route(self.wire.router, 1)
        if is_started:
            self.start()

    def start(self) -> None:
        self.dispatcher.start(self.transport, {1: self.wire})

    def answer(self, job_id: int = 1) -> None:
        ok = JobResult(job_id=job_id, status=JobStatus.OK, num_bytes=5)
        self.wire.deliver(RECORD_STARTED, encode_started(Started(RUN, 1, job_id)))
        self.wire.deliver(RECORD_ACK, encode_ack(Ack(RUN, 1, ok)))
        self.dispatcher.finished_here(ok)


@pytest.fixture
def zero():
    rank = RankZero()
    yield rank
    rank.dispatcher.close(0)


def test_an_outcome_wakes_the_engine_and_is_taken_once(zero):
    zero.dispatcher.submit(JOB, tag=7, num_bytes=1)
    assert [frame_type for frame_type, _ in zero.wire.sent] == [RECORD_JOB]
    assert zero.dispatcher.take() == []
    zero.answer()
    assert zero.woken.is_set()
    (done,) = zero.dispatcher.take()
    assert isinstance(done, Done)
    assert (done.tag, done.num_bytes) == (7, 5)
    assert zero.dispatcher.take() == []


@pytest.mark.parametrize("frame_type", [RECORD_STARTED, RECORD_ACK, HEARTBEAT])
def test_a_frame_that_cannot_be_read_poisons(zero, frame_type):
    zero.wire.deliver(frame_type, b"\xc1garbage")
    with pytest.raises(Poisoned, match="cannot be read"):
        zero.dispatcher.take()
    assert len(zero.poisons) == 1
    assert zero.wire.failed[0].startswith("poisoned: protocol: link to rank 1")


def test_a_peer_that_stops_reading_poisons(zero):
    zero.wire.is_full = True
    zero.dispatcher.submit(JOB, tag=1, num_bytes=1)
    with pytest.raises(Poisoned, match="frames wait to be sent"):
        zero.dispatcher.take()


@pytest.mark.parametrize("error", [Poisoned("the transport is closed"), ValueError("job ids do not rise")])
def test_a_job_that_rank_zero_cannot_begin_poisons(zero, error):
    zero.transport.refuses = error
    zero.dispatcher.submit(JOB, tag=1, num_bytes=1)
    with pytest.raises(Poisoned, match=f"rank 0: {error}"):
        zero.dispatcher.take()


def test_a_device_fault_poisons(zero):
    zero.dispatcher.fault_here("the copy engine failed")
    with pytest.raises(Poisoned, match="copy engine"):
        zero.dispatcher.take()


def test_a_bug_in_a_handler_poisons_instead_of_being_lost(zero, caplog):
    zero.transport.refuses = RuntimeError("a bug")
    zero.dispatcher.submit(JOB, tag=1, num_bytes=1)
    with pytest.raises(Poisoned, match="internal: RuntimeError: a bug"):
        zero.dispatcher.take()
    assert "record dispatcher failed" in caplog.text


def test_deadlines_are_kept_by_the_dispatchers_own_clock():
    rank = RankZero(started_seconds=0.0)
    poisoned = threading.Event()
    rank.dispatcher._on_poison = lambda _: poisoned.set()
    rank.dispatcher.submit(JOB, tag=1, num_bytes=1)
    assert poisoned.wait(10)
    rank.dispatcher.close(0)


def test_a_link_that_ends_while_ranks_join_poisons_once_they_have():
    rank = RankZero(is_started=False)
    rank.wire.end()
    assert rank.poisons == []
    rank.start()
    assert rank.poisons == ["link-lost: link to rank 1: the wire was cut"]
    rank.dispatcher.close(0)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (EndCause.DISCONNECTED, PoisonReason.LINK_LOST),
        (EndCause.CLOSED_BY_PEER, PoisonReason.LINK_LOST),
        (EndCause.SILENT, PoisonReason.SILENT),
        (EndCause.PROTOCOL, PoisonReason.PROTOCOL),
        (EndCause.RECEIVER_RAISED, PoisonReason.INTERNAL),
    ],
)
def test_a_lost_link_is_named_by_how_it_ended(zero, cause, reason):
    zero.wire.end(cause)
    assert [poison_reason(message) for message in zero.poisons] == [reason]


def test_a_dispatcher_that_is_stuck_sends_no_heartbeat_and_ends_itself(monkeypatch):
    monkeypatch.setattr("flare_cache.dispatcher._TICK_SECONDS", 0.001)
    rank = RankZero()
    go_on, ended = threading.Event(), threading.Event()
    rank.dispatcher._on_outcome = lambda: go_on.wait(20)
    rank.dispatcher._on_poison = lambda reason: (rank.poisons.append(reason), ended.set())
    rank.dispatcher.submit(JOB, tag=7, num_bytes=5)
    stuck = threading.Thread(target=rank.answer)
    stuck.start()
    assert ended.wait(20)
    assert rank.dispatcher.pulse() is None
    assert rank.poisons[0].startswith("internal: the dispatcher has been stuck for")
    go_on.set()
    stuck.join()
    rank.dispatcher.close(0)


def test_a_job_before_the_start_poisons():
    rank = RankZero(is_started=False)
    rank.dispatcher.submit(JOB, tag=1, num_bytes=1)
    with pytest.raises(Poisoned):
        rank.dispatcher.take()


def test_closing_shuts_the_links_and_their_end_is_no_loss(zero):
    zero.dispatcher.step_finished(3)
    assert decode_progress(zero.dispatcher.pulse()) == Progress(3, 0)
    assert zero.transport.steps == [3]
    zero.dispatcher.wait_for_jobs([])
    zero.dispatcher.wait_for_jobs([4])
    assert zero.transport.waited == [[4]]
    zero.wire.deliver(HEARTBEAT, encode_progress(Progress(2, 1)))
    assert zero.dispatcher.peer_progress == {1: Progress(2, 1)}
    assert zero.dispatcher.close(0)
    zero.wire.end(EndCause.CLOSED_HERE)
    assert zero.wire.is_shut
    assert zero.dispatcher.take() == []


def test_a_cancelled_job_that_waits_is_withdrawn():
    rank = RankZero(max_outstanding=1)
    rank.dispatcher.submit(JOB, tag=1, num_bytes=1)
    rank.dispatcher.submit(JOB, tag=2, num_bytes=1)
    assert (rank.dispatcher.num_waiting, rank.dispatcher.num_outstanding) == (1, 1)
    rank.dispatcher.cancel(2)
    assert [outcome.tag for outcome in rank.dispatcher.take()] == [2]
    rank.dispatcher.close(0)


class Peer:
    """A peer service on a wire."""

    def __init__(self, *, is_serving: bool = True) -> None:
        self.ends: list[ServiceEnd] = []
        self.service = PeerService(run_id=RUN, rank=1, on_end=self.ends.append, drain_seconds=0.1)
        self.wire, self.transport = Wire(), Transport()
        self.service.route(self.wire.router)
        self.service.attach(self.transport, self.wire)
        if is_serving:
            self.service.serve()


def job_frame(job_id: int = 1, run_id: bytes = RUN) -> bytes:
    numbered = Job(job_id=job_id, op=JobOp.FETCH, tier=Tier.DISK, record=IDENTITY, sections=(Section(0, 1),))
    return encode_job(run_id, numbered)


def test_a_job_is_accepted_at_once_and_acknowledged_when_it_ends():
    peer = Peer()
    peer.wire.deliver(RECORD_JOB, job_frame())
    assert [job.job_id for job in peer.transport.jobs] == [1]
    assert decode_started(peer.wire.sent[0][1]) == Started(RUN, 1, 1)
    long = JobResult(job_id=1, status=JobStatus.FAILED, reason="ß" * 5000)
    peer.service.finished_here(long)
    frame_type, payload = peer.wire.sent[1]
    frame_type.check_size(len(payload))
    ack = decode_ack(payload)
    assert (ack.run_id, ack.rank, len(ack.result.reason)) == (RUN, 1, MAX_REASON_CHARACTERS)
    assert decode_progress(peer.service.pulse()) == Progress(0, 1)


@pytest.mark.parametrize(
    ("frame_type", "payload", "text"),
    [
        (RECORD_JOB, b"\xc1", "cannot be read"),
        (RECORD_JOB, job_frame(run_id=b"another-run-1234"), "another run"),
        (HEARTBEAT, b"\xc1", "cannot be read"),
    ],
)
def test_a_frame_that_is_not_of_this_run_gives_the_link_up(frame_type, payload, text):
    peer = Peer()
    peer.wire.deliver(frame_type, payload)
    assert text in peer.wire.failed[0]
    assert peer.transport.jobs == []


def test_a_job_that_cannot_be_taken_or_acknowledged_gives_the_link_up():
    peer = Peer()
    peer.transport.refuses = Poisoned("closed")
    peer.wire.deliver(RECORD_JOB, job_frame())
    assert "job 1 cannot be taken: closed" in peer.wire.failed[0]
    peer.wire.is_full = True
    peer.service.finished_here(JobResult(job_id=1, status=JobStatus.OK))
    assert "cannot be acknowledged" in peer.wire.failed[1]
    peer.service.fault_here("the device is gone")
    assert peer.wire.failed[2] == "the device is gone"


@pytest.mark.parametrize("drains", [True, False])
def test_when_the_link_ends_the_transport_is_closed_and_the_process_is_told(drains, caplog):
    peer = Peer()
    peer.transport.drains = drains
    peer.service.step_finished(4)
    peer.service.wait_for_jobs([1])
    peer.service.wait_for_jobs([])
    peer.wire.end()
    assert peer.service.wait_ended(10)
    assert peer.ends == [ServiceEnd("the wire was cut", is_loss=True, is_drained=drains, loss=PoisonReason.LINK_LOST)]
    assert (peer.transport.num_closed, peer.transport.steps, peer.transport.waited) == (1, [4], [[1]])
    assert ("did not end within" in caplog.text) is not drains


def test_an_end_in_order_is_no_loss():
    peer = Peer()
    peer.wire.deliver(HEARTBEAT, encode_progress(Progress(5, 6)))
    assert peer.service.leader_progress == Progress(5, 6)
    assert not peer.service.close(0.0)
    assert peer.wire.is_shut
    peer.wire.end(EndCause.CLOSED_BY_PEER)
    assert peer.service.wait_ended(10)
    assert not peer.ends[0].is_loss


def test_an_end_while_ranks_join_is_told_once_they_have():
    peer = Peer(is_serving=False)
    peer.wire.end()
    assert peer.ends == []
    peer.service.serve()
    assert peer.service.wait_ended(10)
    assert peer.ends[0].is_loss


def test_events_are_handled_in_order_one_at_a_time_and_never_block_who_brings_them():
    handled: list[int] = []
    entered, leave = threading.Event(), threading.Event()

    def handle(event: int) -> None:
        if event == 0:
            turnstile.post(1)
            entered.set()
            leave.wait(10)
        handled.append(event)

    turnstile: Turnstile[int] = Turnstile(handle)
    first = threading.Thread(target=turnstile.post, args=(0,))
    first.start()
    assert entered.wait(10)
    turnstile.post(2)
    assert handled == []
    leave.set()
    first.join()
    assert handled == [0, 1, 2]


def test_no_event_is_lost_between_threads():
    total: list[int] = []
    turnstile: Turnstile[int] = Turnstile(total.append)
    threads = [threading.Thread(target=lambda: [turnstile.post(number) for number in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(total) == 8000
