"""The prefix store over scripted ranks: what happens to tickets, bytes and records whatever becomes of the jobs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.eviction import Budget
from flare_cache.index import RecordIndex
from flare_cache.jobs import Job, JobOp, JobStatus
from flare_cache.outcomes import Done, Failed, Outcome, RankFailure, Withdrawal, Withdrawn
from flare_cache.record_plan import FileSizes, RecordBounds
from flare_cache.testing import token_geometries
from flare_cache.tier_store import TierContent, TierStore
from flare_core.keys import chain_keys, root_key, token_array
from flare_core.prefix import FetchFinished, PrefixQuery, StoreFinished, StoreRequest, Tier

PAGE = 4
ROOT = root_key(bytes(32), b"")
SIZES = FileSizes(token_geometries(1, row_bytes=100))
ONE_PAGE = 8192


@dataclass
class Waiting:
    job: Job
    tag: int
    expires_at: float | None


class Script:
    """Takes jobs; the test says what becomes of each."""

    def __init__(self) -> None:
        self.open: list[Waiting] = []
        self.outcomes: list[Outcome] = []
        self.cancelled: list[int] = []
        self.ids = itertools.count(1)

    def submit(self, job: Job, *, tag: int, num_bytes: int, expires_at: float | None = None) -> None:
        assert job.job_id == 0
        assert num_bytes >= 0
        self.open.append(Waiting(msgspec.structs.replace(job, job_id=next(self.ids)), tag, expires_at))

    def cancel(self, tag: int) -> None:
        self.cancelled.append(tag)

    def take(self) -> list[Outcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def end(self, waiting: Waiting, how: str = "done") -> None:
        self.open.remove(waiting)
        failure = RankFailure(1, JobStatus.FAILED, "EIO: broken")
        match how:
            case "done":
                self.outcomes.append(Done(waiting.tag, waiting.job, 1, {0: 0.1}))
            case "failed":
                self.outcomes.append(Failed(waiting.tag, waiting.job, (failure,), (), {0: 0.1, 1: 0.2}))
            case "unclean":
                self.outcomes.append(Failed(waiting.tag, waiting.job, (failure,), (failure,), {0: 0.1, 1: 0.2}))
            case "late":
                self.outcomes.append(Withdrawn(waiting.tag, waiting.job, Withdrawal.LATE))
            case _:
                self.outcomes.append(Withdrawn(waiting.tag, waiting.job, Withdrawal.CANCELLED))


class Bench:
    """A store, its script and its clock."""

    def __init__(self, *, limit: int = 1 << 30, max_sections: int = 1, has_rows: bool = False, tiers=(Tier.DISK,)):
        self.script = Script()
        self.now = 0.0
        self.content = {tier: TierContent(RecordIndex(PAGE), Budget(limit)) for tier in tiers}
        numbers = itertools.count()
        self.store = TierStore(
            self.content,
            bounds=RecordBounds(PAGE, max_sections, 1),
            sizes=SIZES,
            jobs=self.script,
            has_rows=has_rows,
            clock=lambda: self.now,
            draw_store_id=lambda: next(numbers).to_bytes(16, "little"),
        )
        self.events: dict[int, object] = {}

    def ask(self, tokens: Sequence[int], *, row: bool = False) -> int | None:
        ids = token_array(tokens)
        keys = chain_keys(ROOT, ids, PAGE)
        tail = 50 if len(tokens) % PAGE else None
        return self.store.store(StoreRequest(ROOT, ids, keys, list(range(len(keys))), tail, 1 if row else None, 1))

    def poll(self) -> None:
        for event in self.store.poll():
            assert event.ticket not in self.events
            self.events[event.ticket] = event

    def end(self, how: str = "done", *, op: JobOp | None = None, last: bool = False) -> None:
        """End the first (or last) open job of this kind."""
        found = [waiting for waiting in self.script.open if op is None or waiting.job.op is op]
        self.script.end(found[-1 if last else 0], how)
        self.poll()

    def run(self) -> None:
        self.poll()
        while self.script.open:
            self.end()

    def put(self, tokens: Sequence[int], **options) -> StoreFinished:
        ticket = self.ask(tokens, **options)
        self.run()
        return self.events[ticket]

    def query(self, tokens: Sequence[int]) -> PrefixQuery:
        ids = token_array(tokens)
        return PrefixQuery(ROOT, ids, chain_keys(ROOT, ids, PAGE))

    def get(self, tokens: Sequence[int], restorable=None) -> int:
        query = self.query(tokens)
        restorable = restorable or self.store.lookup(query)
        return self.store.fetch(query, restorable, pages=list(range(60)), row_slot=0, after_step=0)

    def ops(self) -> list[JobOp]:
        return [waiting.job.op for waiting in self.script.open]

    def charged(self, tier: Tier = Tier.DISK) -> int:
        return self.content[tier].budget.charged_bytes


LONG = list(range(12))


def test_a_child_is_stored_after_its_parent_and_one_event_ends_the_ticket():
    bench = Bench()
    ticket = bench.ask(LONG)
    assert len(bench.script.open) == 1
    bench.end()
    assert (len(bench.script.open), bench.events) == (1, {})
    bench.run()
    assert bench.events == {ticket: StoreFinished(ticket, 3)}
    assert bench.store.is_idle
    assert bench.charged() == 3 * ONE_PAGE


def test_a_request_waits_for_what_another_request_is_storing():
    bench = Bench()
    first, second = bench.ask(LONG[:8]), bench.ask(LONG)
    bench.end()
    bench.end("failed")
    assert bench.events[first] == StoreFinished(first, 1, "rank 1: EIO: broken")
    assert bench.events[second] == StoreFinished(second, 0, "parent")
    assert bench.charged() == ONE_PAGE
    assert bench.store.statistics().stores_dropped == {"failed": 1, "parent": 1}
    assert bench.put(LONG).num_records == 2


def test_what_a_failed_store_left_behind_stays_charged_and_its_name_taken():
    bench = Bench()
    ticket = bench.ask(LONG[:4])
    bench.end("unclean")
    assert bench.events[ticket].num_records == 0
    assert bench.charged() == ONE_PAGE
    assert bench.ask(LONG[:4]) is None
    assert bench.ask(LONG[:8]) is None
    assert bench.store.lookup(bench.query(LONG)).segments == ()


def test_a_store_that_waited_too_long_is_dropped_and_counted():
    bench = Bench()
    bench.ask(LONG)
    assert bench.script.open[0].expires_at == 10.0
    bench.end("late")
    assert bench.store.statistics().stores_dropped == {"late": 1, "parent": 2}
    assert (bench.charged(), len(bench.content[Tier.DISK].index)) == (0, 0)
    assert bench.store.is_idle


def test_a_store_waits_for_the_space_that_eviction_gives_back():
    bench = Bench(limit=2 * ONE_PAGE)
    bench.put([1, 1, 1, 1])
    bench.put([2, 2, 2, 2])
    ticket = bench.ask([3, 3, 3, 3])
    assert bench.ops() == [JobOp.UNLINK]
    assert bench.store.lookup(bench.query([1, 1, 1, 1])).segments == ()
    bench.now = 9.0
    bench.poll()
    assert bench.ops() == [JobOp.UNLINK]
    bench.run()
    assert bench.events[ticket].num_records == 1
    assert bench.store.statistics().records_evicted == {Tier.DISK: 1}


def test_a_store_that_waits_too_long_for_space_is_dropped():
    bench = Bench(limit=ONE_PAGE)
    bench.put([1, 1, 1, 1])
    ticket = bench.ask([2, 2, 2, 2])
    bench.now = 10.0
    bench.poll()
    assert bench.events[ticket].failure == "late"
    bench.run()
    assert bench.charged() == 0


def test_nothing_is_evicted_for_what_cannot_fit():
    bench = Bench(limit=2 * ONE_PAGE, max_sections=9)
    bench.put([1, 1, 1, 1])
    assert bench.put([*LONG, 12, 13, 14, 15]).failure == "full"
    assert bench.ops() == []
    assert bench.store.lookup(bench.query([1, 1, 1, 1])).num_tokens == 4


def test_an_unlink_that_fails_leaves_its_bytes_charged_and_room_is_made_elsewhere():
    bench = Bench(limit=2 * ONE_PAGE)
    bench.put([1, 1, 1, 1])
    bench.put([2, 2, 2, 2])
    ticket = bench.ask([3, 3, 3, 3])
    bench.end("failed")
    assert bench.ops() == [JobOp.UNLINK]
    bench.run()
    assert bench.events[ticket].num_records == 1
    assert bench.charged() == 2 * ONE_PAGE
    assert bench.ask([1, 1, 1, 1]) is None


def test_a_pinned_record_is_not_evicted():
    bench = Bench(limit=ONE_PAGE)
    bench.put([1, 1, 1, 1])
    bench.get([1, 1, 1, 1])
    assert bench.ask([2, 2, 2, 2]) is not None
    bench.poll()
    assert bench.ops() == [JobOp.FETCH]
    assert bench.store.statistics().stores_dropped == {"full": 1}
    assert bench.store.statistics().tiers[Tier.DISK].num_fetches_pending == 1


def test_the_restored_prefix_ends_in_front_of_the_record_that_failed():
    bench = Bench()
    bench.put(LONG)
    ticket = bench.get(LONG)
    middle = bench.script.open[1]
    bench.script.end(middle, "failed")
    bench.poll()
    assert bench.events.get(ticket) is None
    assert bench.script.cancelled == [bench.script.open[1].tag]
    bench.end()
    bench.end("cancelled", op=JobOp.FETCH)
    assert bench.events[ticket] == FetchFinished(ticket, 4, {Tier.DISK: 4}, row_restored=False, jobs=(4,))
    # Its subtree goes, leaves first, once nothing reads it.
    assert [waiting.job.record.start for waiting in bench.script.open] == [8, 4]
    bench.run()
    assert bench.charged() == ONE_PAGE
    assert bench.store.statistics().hit_tokens == {Tier.DISK: 4}
    assert bench.put(LONG).num_records == 2


def test_a_record_that_extends_a_failed_one_is_undone_when_it_arrives():
    bench = Bench()
    bench.put(LONG[:4])
    storing = bench.ask(LONG)
    bench.get(LONG[:4])
    bench.end("failed", op=JobOp.FETCH)
    assert bench.ops() == [JobOp.STORE]
    bench.end()
    assert bench.events[storing].num_records == 0
    assert [waiting.job.record.start for waiting in bench.script.open] == [4, 0]
    bench.run()
    assert (bench.charged(), len(bench.content[Tier.DISK].index)) == (0, 0)


def test_a_store_in_flight_below_a_failed_record_that_fails_lets_its_parent_go():
    bench = Bench()
    bench.put(LONG[:4])
    bench.ask(LONG[:8])
    bench.get(LONG[:4])
    bench.end("failed", op=JobOp.FETCH)
    bench.end("failed", op=JobOp.STORE)
    assert bench.ops() == [JobOp.UNLINK]
    bench.run()
    assert bench.charged() == 0


def test_what_is_ready_below_a_failed_record_is_given_up():
    bench = Bench(limit=3 * ONE_PAGE)
    bench.put(LONG[:4])
    bench.put([9, 9, 9, 9])
    bench.put([8, 8, 8, 8])
    ticket = bench.ask(LONG[:8])
    assert bench.ops() == [JobOp.UNLINK]
    bench.get(LONG[:4])
    bench.end("failed", op=JobOp.FETCH)
    assert bench.events[ticket].failure == "parent"
    bench.run()
    assert bench.store.is_idle


def test_a_record_that_went_between_lookup_and_fetch_ends_the_prefix():
    bench = Bench()
    bench.put(LONG)
    restorable = bench.store.lookup(bench.query(LONG))
    bench.store.reset(Tier.DISK)
    ticket = bench.get(LONG, restorable)
    bench.poll()
    assert bench.events[ticket] == FetchFinished(ticket, 0, {}, row_restored=False, jobs=())
    bench.run()
    assert bench.charged() == 0


def test_pages_without_their_row_are_of_no_use_to_a_model_with_rows():
    bench = Bench(has_rows=True)
    bench.put(LONG, row=True)
    ticket = bench.get(LONG)
    assert [waiting.job.row_slot for waiting in bench.script.open] == [None, None, 0]
    bench.end("failed", last=True)
    bench.end(op=JobOp.FETCH)
    bench.end(op=JobOp.FETCH)
    assert bench.events[ticket] == FetchFinished(ticket, 0, {}, row_restored=False, jobs=(4, 5))


def test_a_row_is_dropped_where_a_later_one_stands_in_and_its_record_cannot_go():
    bench = Bench(has_rows=True, limit=3 * 4096 + 3 * 4096 + 4096)
    bench.put(LONG[:4], row=True)
    bench.put(LONG[:8], row=True)
    (deeper,) = (one for one in bench.content[Tier.DISK].index.records() if one.identity.start)
    deeper.num_pins += 1
    ticket = bench.ask([7, 7, 7])
    (truncation,) = bench.script.open
    assert (truncation.job.op, truncation.job.record.start, truncation.job.keep_tail) == (JobOp.TRUNCATE, 0, False)
    assert bench.store.lookup(bench.query(LONG[:5])).segments == ()
    bench.run()
    assert bench.events[ticket].num_records == 1
    assert bench.store.lookup(bench.query(LONG)).num_tokens == 8
    assert bench.charged() == 2 * 4096 + 3 * 4096 + 2 * 4096


def test_a_covered_tail_is_dropped_when_nothing_reads_it_any_more():
    bench = Bench(max_sections=4)
    bench.put(LONG[:6])
    bench.get(LONG[:6])
    ticket = bench.ask(LONG)
    bench.end(op=JobOp.STORE)
    assert bench.events[ticket].num_records == 1
    assert bench.ops() == [JobOp.FETCH]
    bench.end()
    assert bench.ops() == [JobOp.TRUNCATE]
    bench.run()
    assert bench.charged() == 4 * 4096 + ONE_PAGE - 4096
    assert bench.store.lookup(bench.query(LONG[:6])).num_tokens == 6


def test_a_record_that_is_only_a_covered_tail_goes_whole():
    bench = Bench(max_sections=4)
    bench.put(LONG[:8])
    bench.put(LONG[:9])
    bench.put(LONG[:11])
    assert len(bench.content[Tier.DISK].index) == 2
    assert bench.charged() == 4096 + 2 * 4096 + ONE_PAGE


def test_a_truncation_that_fails_leaves_its_bytes_charged():
    bench = Bench(max_sections=4)
    bench.put(LONG[:6])
    bench.ask(LONG)
    bench.end()
    bench.end("failed", op=JobOp.TRUNCATE)
    assert bench.charged() == 3 * 4096 + 3 * 4096
    assert bench.store.is_idle


def test_tiers_keep_their_own_records():
    bench = Bench(tiers=(Tier.MEMORY, Tier.DISK))
    ticket = bench.ask(LONG[:4])
    assert [waiting.job.tier for waiting in bench.script.open] == [Tier.MEMORY, Tier.DISK]
    bench.end("failed")
    bench.end()
    assert bench.events[ticket] == StoreFinished(ticket, 1, "rank 1: EIO: broken")
    assert [segment.tier for segment in bench.store.lookup(bench.query(LONG)).segments] == [Tier.DISK]
    assert bench.store.keys_by_use(Tier.MEMORY) == []
    assert len(bench.store.keys_by_use(Tier.DISK)) == 1
    assert bench.store.keys_by_use(Tier.POOL) == []


def test_a_cancelled_fetch_still_ends():
    bench = Bench()
    bench.put(LONG)
    ticket = bench.get(LONG)
    bench.store.cancel(ticket)
    bench.store.cancel(12345)
    assert len(bench.script.cancelled) == 3
    bench.end()
    bench.end("cancelled")
    bench.end("cancelled")
    assert bench.events[ticket].num_tokens == 4


OUTCOMES = {
    JobOp.STORE: ["done", "done", "done", "failed", "unclean", "late"],
    JobOp.FETCH: ["done", "done", "failed", "cancelled"],
    JobOp.TRUNCATE: ["done", "done", "failed"],
    JobOp.UNLINK: ["done", "done", "done", "failed"],
}


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans(), st.integers(3, 12))
def test_whatever_becomes_of_jobs_every_ticket_ends_and_the_books_balance(data, has_rows, limit_pages):
    bench = Bench(limit=limit_pages * 4096, max_sections=data.draw(st.integers(1, 3)), has_rows=has_rows)
    tickets: set[int] = set()
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["store", "fetch", "end", "end", "end", "wait", "reset"])):
            case "store":
                ticket = bench.ask(data.draw(prompts), row=has_rows)
                tickets |= {ticket} if ticket is not None else set()
            case "fetch":
                tokens = data.draw(prompts)
                if bench.store.lookup(bench.query(tokens)).segments:
                    tickets.add(bench.get(tokens))
            case "wait":
                bench.now += 4.0
            case "reset":
                bench.store.reset(Tier.DISK)
            case _ if bench.script.open:
                waiting = data.draw(st.sampled_from(bench.script.open))
                bench.script.end(waiting, data.draw(st.sampled_from(OUTCOMES[waiting.job.op])))
        bench.poll()
        check_books(bench)
    while bench.script.open:
        bench.end()
        check_books(bench)
    assert set(bench.events) == tickets
    assert bench.store.is_idle
    index = bench.content[Tier.DISK].index
    assert all(record.num_pins == 0 for record in index.records())
    assert bench.charged() == sum(record.num_bytes for record in index.records())


def check_books(bench: Bench) -> None:
    content = bench.content[Tier.DISK]
    assert 0 <= content.budget.charged_bytes <= content.budget.limit_bytes
    stored = [record for record in content.index.records() if record.is_stored]
    assert content.budget.charged_bytes >= sum(record.num_bytes for record in stored)
    for record in content.index.records():
        if record.is_usable and record.parent is not None:
            assert record.parent.is_usable
            assert content.index.get(record.parent.key) is record.parent
            assert not record.is_stored or record.parent.is_stored
