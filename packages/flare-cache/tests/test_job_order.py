"""The order of jobs: compared with a plain model under arbitrary arrivals, steps and endings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_cache.job_order import JobOrder
from flare_cache.jobs import Job, JobOp, RecordIdentity, Section
from flare_core.prefix import Tier


def job(job_id: int, *, key: int = 0, pages=(), slot=None, after_step: int = 0, tier=Tier.DISK) -> Job:
    record = RecordIdentity(
        key=bytes([key]) * 32, store_id=bytes(16), parent_key=b"", start_key=bytes(32), start=0, end=4, page_tokens=4,
        tail_tokens=0, has_row=False,
    )  # fmt: skip
    sections = tuple(Section(at, page) for at, page in enumerate(pages))
    return Job(
        job_id=job_id, op=JobOp.FETCH, tier=tier, record=record, sections=sections, row_slot=slot,
        after_step=after_step,
    )  # fmt: skip


def ids(jobs) -> list[int]:
    return [one.job_id for one in jobs]


jobs_strategy = st.builds(
    dict,
    key=st.integers(0, 3),
    pages=st.sets(st.integers(0, 5), max_size=3),
    slot=st.none() | st.integers(0, 1),
    after_step=st.integers(0, 4),
    tier=st.sampled_from([Tier.DISK, Tier.MEMORY]),
)


def named(one: Job) -> set:
    names = {(one.tier, one.record.key)} | {section.page for section in one.sections}
    return names | ({("row", one.row_slot)} if one.row_slot is not None else set())


@given(st.lists(jobs_strategy, max_size=14), st.data())
def test_a_job_starts_exactly_when_its_step_and_all_earlier_sharers_have_ended(fields, data) -> None:
    order = JobOrder()
    arriving = [job(number, **one) for number, one in enumerate(fields, 1)]
    live: list[Job] = []
    running: list[int] = []
    started: set[int] = set()
    step = 0

    def expected() -> set[int]:
        return {
            one.job_id
            for at, one in enumerate(live)
            if one.after_step <= step and not any(named(one) & named(earlier) for earlier in live[:at])
        }

    while arriving or live:
        choices = (["arrive"] if arriving else []) + (["end"] if running else []) + ["step"]
        match data.draw(st.sampled_from(choices)):
            case "arrive":
                live.append(arriving.pop(0))
                ready = order.add(live[-1])
            case "end":
                ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
                live = [one for one in live if one.job_id != ended]
                ready = order.finished(ended)
                assert order.is_finished(ended)
            case _:
                step = min(step + data.draw(st.integers(0, 2)), 4) if step < 4 else 4
                ready = order.step_finished(step)
        assert ids(ready) == sorted(ids(ready))
        assert not started & set(ids(ready))
        started |= set(ids(ready))
        running += ids(ready)
        assert set(running) == expected()
        assert order.num_jobs == len(live)


def test_jobs_that_wait_can_be_dropped_and_those_that_run_cannot() -> None:
    order = JobOrder()
    assert ids(order.add(job(1, pages=(1,)))) == [1]
    for waiting in (job(2, pages=(1,)), job(3, key=1, after_step=5), job(4, key=1), job(5, key=2, pages=(1, 2))):
        assert order.add(waiting) == []
    assert ids(order.drop_waiting()) == [2, 3, 4, 5]
    assert order.step_finished(5) == []
    assert order.finished(1) == []
    assert order.num_jobs == 0
    assert ids(order.add(job(6, key=1, pages=(1, 2)))) == [6]


def test_job_ids_rise_and_what_was_never_added_is_not_finished() -> None:
    order = JobOrder()
    order.add(job(3))
    with pytest.raises(ValueError, match="job 3 after job 3"):
        order.add(job(3))
    assert order.is_finished(2)
    assert not order.is_finished(3)
    assert not order.is_finished(4)


def test_an_older_step_changes_nothing() -> None:
    order = JobOrder()
    order.step_finished(7)
    order.step_finished(3)
    assert order.last_step == 7
    assert ids(order.add(job(1, after_step=7))) == [1]
