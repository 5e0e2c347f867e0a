"""The prefix store over scripted ranks: what becomes of tickets and records whatever becomes of the jobs."""

from __future__ import annotations

from flare_cache.jobs import JobOp
from flare_core.prefix import FetchFinished, StoreFinished, Tier

ONE_PAGE = 8192
LONG = list(range(12))


def test_a_child_is_stored_after_its_parent_and_one_event_ends_the_ticket(new_bench):
    bench = new_bench()
    ticket = bench.ask(LONG)
    assert len(bench.script.open) == 1
    bench.end()
    assert (len(bench.script.open), bench.events) == (1, {})
    bench.run()
    assert bench.events == {ticket: StoreFinished(ticket, 3)}
    assert bench.store.is_idle
    assert bench.charged() == 3 * ONE_PAGE


def test_a_request_waits_for_what_another_request_is_storing(new_bench):
    bench = new_bench()
    first, second = bench.ask(LONG[:8]), bench.ask(LONG)
    bench.end()
    bench.end("failed")
    assert bench.events[first] == StoreFinished(first, 1, "rank 1: EIO: broken")
    assert bench.events[second] == StoreFinished(second, 0, "parent")
    assert bench.charged() == ONE_PAGE
    assert bench.store.statistics().stores_dropped == {"failed": 1, "parent": 1}
    assert bench.put(LONG).num_records == 2


def test_what_a_failed_store_left_behind_stays_charged_and_its_name_taken(new_bench):
    bench = new_bench()
    ticket = bench.ask(LONG[:4])
    bench.end("unclean")
    assert bench.events[ticket].num_records == 0
    assert bench.charged() == ONE_PAGE
    assert bench.ask(LONG[:4]) is None
    assert bench.ask(LONG[:8]) is None
    assert bench.store.lookup(bench.query(LONG)).segments == ()


def test_a_store_that_waited_too_long_is_dropped_and_counted(new_bench):
    bench = new_bench()
    bench.ask(LONG)
    assert bench.script.open[0].expires_at == 10.0
    bench.end("late")
    assert bench.store.statistics().stores_dropped == {"late": 1, "parent": 2}
    assert (bench.charged(), len(bench.content[Tier.DISK].index)) == (0, 0)
    assert bench.store.is_idle


def test_the_restored_prefix_ends_in_front_of_the_record_that_failed(new_bench):
    bench = new_bench()
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


def test_a_record_that_extends_a_failed_one_is_undone_when_it_arrives(new_bench):
    bench = new_bench()
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


def test_a_store_in_flight_below_a_failed_record_that_fails_lets_its_parent_go(new_bench):
    bench = new_bench()
    bench.put(LONG[:4])
    bench.ask(LONG[:8])
    bench.get(LONG[:4])
    bench.end("failed", op=JobOp.FETCH)
    bench.end("failed", op=JobOp.STORE)
    assert bench.ops() == [JobOp.UNLINK]
    bench.run()
    assert bench.charged() == 0


def test_what_is_ready_below_a_failed_record_is_given_up(new_bench):
    bench = new_bench(limit=3 * ONE_PAGE)
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


def test_a_record_that_went_between_lookup_and_fetch_ends_the_prefix(new_bench):
    bench = new_bench()
    bench.put(LONG)
    restorable = bench.store.lookup(bench.query(LONG))
    bench.store.reset(Tier.DISK)
    ticket = bench.get(LONG, restorable)
    bench.poll()
    assert bench.events[ticket] == FetchFinished(ticket, 0, {}, row_restored=False, jobs=())
    bench.run()
    assert bench.charged() == 0


def test_pages_without_their_row_are_of_no_use_to_a_model_with_rows(new_bench):
    bench = new_bench(has_rows=True)
    bench.put(LONG, row=True)
    ticket = bench.get(LONG)
    assert [waiting.job.row_slot for waiting in bench.script.open] == [None, None, 0]
    bench.end("failed", last=True)
    bench.end(op=JobOp.FETCH)
    bench.end(op=JobOp.FETCH)
    assert bench.events[ticket] == FetchFinished(ticket, 0, {}, row_restored=False, jobs=(4, 5))


def test_tiers_keep_their_own_records(new_bench):
    bench = new_bench(tiers=(Tier.MEMORY, Tier.DISK))
    ticket = bench.ask(LONG[:4])
    assert [waiting.job.tier for waiting in bench.script.open] == [Tier.MEMORY, Tier.DISK]
    bench.end("failed")
    bench.end()
    assert bench.events[ticket] == StoreFinished(ticket, 1, "rank 1: EIO: broken")
    assert [segment.tier for segment in bench.store.lookup(bench.query(LONG)).segments] == [Tier.DISK]
    assert bench.store.keys_by_use(Tier.MEMORY) == []
    assert len(bench.store.keys_by_use(Tier.DISK)) == 1
    assert bench.store.keys_by_use(Tier.POOL) == []


def test_a_cancelled_fetch_still_ends(new_bench):
    bench = new_bench()
    bench.put(LONG)
    ticket = bench.get(LONG)
    bench.store.cancel(ticket)
    bench.store.cancel(12345)
    assert len(bench.script.cancelled) == 3
    bench.end()
    bench.end("cancelled")
    bench.end("cancelled")
    assert bench.events[ticket].num_tokens == 4
