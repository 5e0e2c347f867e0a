"""Jobs of the pool on one rank: threads of their own, fetches before puts, and faults that are answers."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import pytest

from flare_cache.host_memory import DirectPassage
from flare_cache.host_pages import HostPages
from flare_cache.jobs import Extent, Job, JobOp, JobStatus, RecordIdentity, Section
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.record import Problem, RecordError
from flare_cache.staged import StagedTransport
from flare_cache.testing import token_geometries
from flare_core.prefix import Tier

SESSION = b"s" * 16
GEOMETRY = token_geometries(1)[0]


@dataclass
class Gate:
    """A pool whose transfers end when the test lets them, or with what the test says."""

    open: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    begun: list[tuple[JobOp, int, float]] = field(default_factory=list)
    parts: tuple[object, ...] = ((),)

    def fetch(self, job, memory, *, since):
        return self.put(job, since=since)

    def put(self, job, *, since):
        self.begun.append((job.op, job.job_id, since))
        if self.error is not None:
            raise self.error
        return self

    def run(self, part):
        self.has_begun.set()
        assert self.open.wait(20)

    def finish(self):
        return 7

    def abandon(self):
        return True


@pytest.fixture
def new_transport():
    made = []

    def make(gate: Gate | None, **fields) -> tuple[StagedTransport, queue.Queue]:
        pages = HostPages.allocate(GEOMETRY, num_pages=8, num_slots=0)
        results: queue.Queue = queue.Queue()
        transport = StagedTransport(
            geometry=GEOMETRY, num_pages=8, num_slots=0, memory=pages,
            shelves={Tier.MEMORY: MemoryShelf(GEOMETRY, bytes(32), DirectPassage(aligned=False), 1 << 20)},
            on_result=results.put, on_fault=results.put, num_threads=1, pool=gate, num_pool_threads=1, **fields,
        )  # fmt: skip
        transport.start()
        made.append((transport, gate))
        return transport, results

    yield make
    for transport, gate in made:
        if gate is not None:
            gate.open.set()
        assert transport.close(20)


def job(job_id: int, op: JobOp, tier: Tier = Tier.POOL, **fields) -> Job:
    record = RecordIdentity(
        key=bytes(32), store_id=bytes(16), parent_key=b"", start_key=bytes(32), start=0, end=4, page_tokens=4,
        tail_tokens=0, has_row=False,
    )  # fmt: skip
    sections = (Section(0, job_id % 8),) if op in (JobOp.FETCH, JobOp.STORE) else ()
    session = SESSION if tier is Tier.POOL else b""
    ids = bytes(16) if op is JobOp.STORE else b""
    return Job(
        job_id=job_id, op=op, tier=tier, record=record, sections=sections, pool_session=session, token_ids=ids, **fields
    )


def test_a_pool_that_does_not_move_holds_up_no_other_tier(new_transport) -> None:
    gate = Gate()
    transport, results = new_transport(gate)
    transport.submit(job(1, JobOp.PUT))
    transport.submit(job(2, JobOp.STORE, Tier.MEMORY))
    transport.submit(job(3, JobOp.FETCH, Tier.MEMORY))
    assert [results.get(timeout=20).job_id for _ in range(2)] == [2, 3]
    gate.open.set()
    done = results.get(timeout=20)
    assert (done.job_id, done.status, done.num_bytes) == (1, JobStatus.OK, 7)


def test_a_fetch_overtakes_puts_that_wait(new_transport) -> None:
    gate = Gate()
    transport, results = new_transport(gate)
    transport.submit(job(1, JobOp.PUT))
    assert gate.has_begun.wait(20)
    transport.submit(job(2, JobOp.PUT))
    transport.submit(job(3, JobOp.FETCH))
    gate.open.set()
    assert [results.get(timeout=20).job_id for _ in range(3)] == [1, 3, 2]


def test_a_job_in_the_pool_knows_since_when_it_could_begin(new_transport) -> None:
    times = iter(range(100, 1000))
    gate = Gate()
    transport, results = new_transport(gate, clock=lambda: float(next(times)))
    transport.submit(job(1, JobOp.PUT, after_step=5))
    transport.submit(job(2, JobOp.PUT))
    transport.step_finished(5)
    gate.open.set()
    for _ in range(2):
        results.get(timeout=20)
    since = {job_id: at for _, job_id, at in gate.begun}
    assert since[2] == 100.0
    assert since[1] > since[2]


@pytest.mark.parametrize(
    ("op", "error", "status"),
    [
        (JobOp.FETCH, RecordError(Problem.MISSING, "gone"), JobStatus.BAD_RECORD),
        (JobOp.FETCH, TimeoutError("the manager does not answer"), JobStatus.FAILED),
        (JobOp.PUT, RecordError(Problem.MISSING, "another session"), JobStatus.FAILED),
        (JobOp.PUT, OSError("pool-quota: 1 GiB"), JobStatus.FAILED),
    ],
)
def test_what_the_pool_raises_is_the_jobs_answer(new_transport, op, error, status) -> None:
    transport, results = new_transport(Gate(error=error))
    transport.submit(job(1, op))
    result = results.get(timeout=20)
    assert result.status is status
    assert str(error) in result.reason


def test_a_rank_without_a_pool_answers_a_job_of_it(new_transport) -> None:
    transport, results = new_transport(None)
    transport.submit(job(1, JobOp.PUT, extent=Extent.TAIL))
    assert results.get(timeout=20).reason == "plan: this rank has no pool tier"
