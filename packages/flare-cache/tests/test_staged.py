"""The staged transport on real files and memory: every byte comes back, or the job says why not."""

from __future__ import annotations

import threading

import msgspec
import pytest

from flare_cache.job_times import BUCKET_SECONDS, reason_code
from flare_cache.jobs import JobOp, JobStatus, Section
from flare_cache.record import file_layout
from flare_cache.record_file import DiskTransport
from flare_cache.staged import StagedTransport
from flare_core.errors import Poisoned
from flare_core.prefix import Tier

TIERS = pytest.mark.parametrize("tier", [Tier.DISK, Tier.MEMORY])


def layout_of(rank, record):
    return file_layout(record, page_bytes=rank.geometry.page_bytes, row_stride=rank.geometry.row_stride)


@TIERS
@pytest.mark.parametrize("transport", [DiskTransport.AUTO, DiskTransport.BUFFERED])
@pytest.mark.parametrize(
    ("num_pages", "tail_tokens", "has_row"), [(3, 2, True), (1, 0, False), (0, 3, False), (9, 0, True)]
)
def test_a_stored_record_is_fetched_whole(
    open_rank, new_identity, tier, transport, num_pages, tail_tokens, has_row
) -> None:
    rank = open_rank(transport=transport)
    record = new_identity(num_pages=num_pages, tail_tokens=tail_tokens, has_row=has_row)
    stored = rank.store(record, tier=tier)
    assert (stored.status, stored.num_bytes) == (JobStatus.OK, layout_of(rank, record).row_end)
    fetched = rank.fetch(record, tier=tier)
    assert fetched.status is JobStatus.OK, fetched.reason
    assert fetched.num_bytes == stored.num_bytes - layout_of(rank, record).header_bytes
    assert rank.page_bytes(12, record.num_sections) == rank.page_bytes(0, record.num_sections)
    if has_row:
        assert rank.pages.row(1) == rank.pages.row(0)


@TIERS
def test_a_fetch_moves_only_the_sections_it_names(open_rank, new_identity, tier) -> None:
    rank = open_rank()
    record = new_identity(num_pages=6)
    rank.store(record, tier=tier)
    before = rank.page_bytes(12, 9)
    row = bytes(rank.pages.row(1))
    sections = (Section(1, 20), Section(2, 12), Section(5, 15), Section(6, 13))
    fetched = rank.fetch(record, sections=sections, row_slot=None, tier=tier)
    assert fetched.num_bytes == 4 * rank.geometry.page_bytes
    for section in sections:
        assert rank.pages.page(section.page) == rank.pages.page(section.index)
    assert rank.pages.page(14) == before[2]
    assert rank.pages.row(1) == row


@TIERS
def test_the_row_alone_can_be_fetched(open_rank, new_identity, tier) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record, tier=tier)
    assert rank.fetch(record, sections=(), row_slot=2, tier=tier).num_bytes == rank.geometry.row_stride
    assert rank.pages.row(2) == rank.pages.row(0)


@TIERS
def test_truncation_drops_the_row_then_the_tail_and_keeps_the_pages(open_rank, new_identity, tier) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record, tier=tier)
    layout = layout_of(rank, record)
    assert rank.truncate(record, keep_tail=True, tier=tier).num_bytes == layout.row_end - layout.tail_end
    assert rank.fetch(record, tier=tier).status is JobStatus.BAD_RECORD
    assert rank.fetch(record, row_slot=None, tier=tier).status is JobStatus.OK
    assert rank.truncate(record, tier=tier).num_bytes == layout.tail_end - layout.pages_end
    pages = tuple(Section(i, 12 + i) for i in range(record.num_pages))
    assert rank.fetch(record, row_slot=None, tier=tier).reason.startswith("truncated")
    assert rank.fetch(record, sections=pages, row_slot=None, tier=tier).status is JobStatus.OK
    again = rank.truncate(record, tier=tier)
    assert (again.status, again.num_bytes) == (JobStatus.OK, 0)


@TIERS
def test_an_unlinked_record_is_missing_and_unlinking_again_is_fine(open_rank, new_identity, tier) -> None:
    rank = open_rank()
    record = new_identity()
    size = rank.store(record, tier=tier).num_bytes
    assert rank.unlink(record, tier=tier).num_bytes == size
    assert rank.fetch(record, tier=tier).reason.startswith("missing")
    again = rank.unlink(record, tier=tier)
    assert (again.status, again.num_bytes) == (JobStatus.OK, 0)
    assert rank.truncate(record, tier=tier).status is JobStatus.FAILED
    assert rank.names() == []
    assert (rank.directory.charged_bytes, rank.memory.used_bytes) == (0, 0)


@TIERS
def test_jobs_on_another_store_of_the_same_key_touch_nothing(open_rank, new_identity, tier) -> None:
    rank = open_rank()
    record = new_identity()
    other = msgspec.structs.replace(record, store_id=bytes(16))
    rank.store(record, tier=tier)
    assert rank.fetch(other, tier=tier).reason.startswith("other-record: store_id")
    assert rank.truncate(other, tier=tier).status is JobStatus.FAILED
    assert rank.unlink(other, tier=tier).status is JobStatus.FAILED
    assert rank.store(other, tier=tier).status is JobStatus.FAILED
    assert rank.fetch(record, tier=tier).status is JobStatus.OK
    assert len(rank.names()) == (tier is Tier.DISK)


def test_the_memory_tier_is_never_filled_over_its_limit(open_rank, new_identity) -> None:
    rank = open_rank(memory_limit=40_000)
    first, second = new_identity("first"), new_identity("second")
    assert rank.store(first, tier=Tier.MEMORY).status is JobStatus.OK
    assert rank.store(second, tier=Tier.MEMORY).reason.startswith("ENOSPC")
    rank.unlink(first, tier=Tier.MEMORY)
    assert rank.store(second, tier=Tier.MEMORY).status is JobStatus.OK


def test_a_job_waits_for_its_step(open_rank, new_identity) -> None:
    rank = open_rank()
    waiting = rank.submit_store(new_identity(), after_step=5)
    others = [new_identity(name, has_row=False) for name in "bcd"]
    for step, other in enumerate(others, 2):
        assert rank.store(other, first_page=6).status is JobStatus.OK
        assert waiting not in rank.done
        rank.transport.step_finished(step)
    rank.transport.step_finished(5)
    assert rank.result(waiting).status is JobStatus.OK


def test_a_step_waits_for_jobs_that_have_not_even_arrived(open_rank, new_identity) -> None:
    rank = open_rank()
    record = new_identity()
    waited = threading.Event()

    def step() -> None:
        rank.transport.wait_for_jobs([1, 2])
        waited.set()

    thread = threading.Thread(target=step)
    thread.start()
    rank.store(record)
    assert not waited.is_set()
    rank.fetch(record)
    assert waited.wait(20)
    thread.join()
    rank.transport.wait_for_jobs([1, 2])


def test_jobs_on_one_record_run_in_their_order(open_rank, new_identity) -> None:
    rank = open_rank()
    record = new_identity()
    jobs = []
    for _ in range(10):
        jobs.append(rank.submit_store(record))
        jobs.append(rank.submit(JobOp.TRUNCATE, record, keep_tail=True))
        jobs.append(rank.submit(JobOp.UNLINK, record))
    assert {rank.result(job).status for job in jobs} == {JobStatus.OK}
    assert rank.names() == []


def test_many_records_at_once_all_come_back(open_rank, new_identity) -> None:
    rank = open_rank()
    records = [new_identity(str(number), num_pages=2, tail_tokens=0, has_row=False) for number in range(6)]
    stores = [rank.submit_store(record, first_page=2 * number) for number, record in enumerate(records)]
    fetches = [
        rank.submit(JobOp.FETCH, record, sections=(Section(0, 12 + 2 * number), Section(1, 13 + 2 * number)))
        for number, record in enumerate(records)
    ]
    assert {rank.result(job).status for job in stores + fetches} == {JobStatus.OK}
    assert rank.page_bytes(0, 12) == rank.page_bytes(12, 12)
    assert rank.transport.num_jobs == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sections": (Section(0, 24),)}, "page 24 of 24"),
        ({"sections": (Section(0, -1),)}, "page -1"),
        ({"sections": (Section(4, 1),)}, "section 4"),
        ({"sections": (Section(1, 1), Section(0, 2))}, "section 0 after 1"),
        ({"sections": (Section(0, 1), Section(1, 1))}, "named twice"),
        ({"sections": (), "row_slot": None}, "nothing to move"),
        ({"row_slot": 3}, "row slot 3 of 3"),
        ({"tier": Tier.POOL}, "a pool session of 0 bytes"),
        ({"tier": Tier.POOL, "pool_session": bytes(16)}, "no pool tier"),
        ({"pool_session": bytes(16)}, "for the disk tier"),
        ({"tier": Tier.DEVICE}, "fetch in the device tier"),
    ],
)
def test_a_job_that_does_not_fit_this_rank_touches_nothing(open_rank, new_identity, fields, words) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    before = rank.page_bytes(0, 24)
    result = rank.fetch(record, **fields)
    assert result.status is JobStatus.FAILED
    assert result.reason.startswith("plan:")
    assert words in result.reason
    assert rank.page_bytes(0, 24) == before


@pytest.mark.parametrize(
    ("changes", "fields", "words"),
    [
        ({"page_tokens": 8, "end": 16 + 8 + 2}, {}, "pages of 8 tokens"),
        ({"key": b""}, {}, "wrong length"),
        ({}, {"sections": (Section(0, 0),)}, "1 of 4 sections"),
        ({}, {"row_slot": None}, "without its slot"),
        ({"has_row": False}, {"row_slot": 0}, "without a row"),
        ({}, {"token_ids": b"1234"}, "4 bytes of token ids"),
    ],
)
def test_a_store_that_does_not_fit_this_rank_writes_nothing(open_rank, new_identity, changes, fields, words) -> None:
    rank = open_rank()
    record = msgspec.structs.replace(new_identity(), **changes)
    plan = {
        "sections": tuple(Section(i, i) for i in range(4)),
        "row_slot": 0,
        "token_ids": bytes(4 * (record.end - record.start)),
    }
    result = rank.result(rank.submit(JobOp.STORE, record, **{**plan, **fields}))
    assert result.status is JobStatus.FAILED
    assert words in result.reason
    assert rank.names() == []


def test_a_job_that_only_removes_names_no_pages(open_rank, new_identity) -> None:
    rank = open_rank()
    result = rank.result(rank.submit(JobOp.UNLINK, new_identity(), sections=(Section(0, 0),)))
    assert "names pages" in result.reason


def test_a_row_is_refused_where_the_model_has_none(open_rank, new_identity, new_geometry) -> None:
    rank = open_rank(geometry=new_geometry(row_bytes=0))
    assert "has none" in rank.store(new_identity()).reason


def test_a_header_over_the_limit_is_refused_before_any_work(open_rank, new_identity) -> None:
    record = new_identity(num_pages=65_000, tail_tokens=0)
    assert "over the limit" in open_rank().unlink(record).reason


def test_job_ids_must_rise(open_rank, new_identity) -> None:
    rank = open_rank()
    rank.unlink(new_identity())
    rank.next_job_id = 1
    with pytest.raises(ValueError, match="job 1 after job 1"):
        rank.unlink(new_identity())


def test_closing_ends_what_runs_and_fails_what_waits(open_rank, new_identity) -> None:
    rank = open_rank()
    waiting = rank.submit_store(new_identity(), after_step=9)
    behind = rank.submit(JobOp.UNLINK, new_identity())
    assert rank.transport.close(20)
    assert {rank.result(job).status for job in (waiting, behind)} == {JobStatus.FAILED}
    assert rank.result(waiting).reason.startswith("closing")
    assert rank.names() == []
    with pytest.raises(Poisoned):
        rank.submit(JobOp.UNLINK, new_identity())
    with pytest.raises(Poisoned):
        rank.transport.wait_for_jobs([99])


def test_jobs_are_counted_and_timed_by_kind(open_rank, new_identity) -> None:
    rank = open_rank()
    record = new_identity()
    size = rank.store(record).num_bytes
    rank.fetch(new_identity("absent"))
    times = rank.transport.times.snapshot()
    assert (sum(times[JobOp.STORE].counts), times[JobOp.STORE].num_bytes) == (1, size)
    assert times[JobOp.FETCH].failures == {"missing": 1}
    assert len(times[JobOp.UNLINK].counts) == len(BUCKET_SECONDS) + 1
    assert reason_code("ENOSPC: No space left on device") == "ENOSPC"


def test_a_job_wakes_a_disk_thread_also_where_a_step_has_waited_longer(open_rank, new_identity, monkeypatch) -> None:
    start, steps = StagedTransport.start, []

    def start_behind_a_step(transport: StagedTransport) -> None:
        steps.append(threading.Thread(target=transport.wait_for_jobs, args=([1],)))
        steps[0].start()
        while not transport._changed._waiters:
            pass
        start(transport)

    monkeypatch.setattr(StagedTransport, "start", start_behind_a_step)
    assert open_rank(num_threads=1).store(new_identity()).status is JobStatus.OK
    steps[0].join(20)
    assert not steps[0].is_alive()
