"""The prefix store over scripted ranks: what makes room, what is compacted, and what that costs and gives back."""

from __future__ import annotations

from flare_cache.jobs import JobOp
from flare_core.prefix import Tier

ONE_PAGE = 8192
LONG = list(range(12))


def test_a_store_waits_for_the_space_that_eviction_gives_back(new_bench):
    bench = new_bench(limit=2 * ONE_PAGE)
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


def test_a_store_that_waits_too_long_for_space_is_dropped(new_bench):
    bench = new_bench(limit=ONE_PAGE)
    bench.put([1, 1, 1, 1])
    ticket = bench.ask([2, 2, 2, 2])
    bench.now = 10.0
    bench.poll()
    assert bench.events[ticket].failure == "late"
    bench.run()
    assert bench.charged() == 0


def test_nothing_is_evicted_for_what_cannot_fit(new_bench):
    bench = new_bench(limit=2 * ONE_PAGE, max_sections=9)
    bench.put([1, 1, 1, 1])
    assert bench.put([*LONG, 12, 13, 14, 15]).failure == "full"
    assert bench.ops() == []
    assert bench.store.lookup(bench.query([1, 1, 1, 1])).num_tokens == 4


def test_an_unlink_that_fails_leaves_its_bytes_charged_and_room_is_made_elsewhere(new_bench):
    bench = new_bench(limit=2 * ONE_PAGE)
    bench.put([1, 1, 1, 1])
    bench.put([2, 2, 2, 2])
    ticket = bench.ask([3, 3, 3, 3])
    bench.end("failed")
    assert bench.ops() == [JobOp.UNLINK]
    bench.run()
    assert bench.events[ticket].num_records == 1
    assert bench.charged() == 2 * ONE_PAGE
    assert bench.ask([1, 1, 1, 1]) is None


def test_a_pinned_record_is_not_evicted(new_bench):
    bench = new_bench(limit=ONE_PAGE)
    bench.put([1, 1, 1, 1])
    bench.get([1, 1, 1, 1])
    assert bench.ask([2, 2, 2, 2]) is not None
    bench.poll()
    assert bench.ops() == [JobOp.FETCH]
    assert bench.store.statistics().stores_dropped == {"full": 1}
    assert bench.store.statistics().tiers[Tier.DISK].num_fetches_pending == 1


def test_a_row_is_dropped_where_a_later_one_stands_in_and_its_record_cannot_go(new_bench):
    bench = new_bench(has_rows=True, limit=3 * 4096 + 3 * 4096 + 4096)
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


def test_a_covered_tail_is_dropped_when_nothing_reads_it_any_more(new_bench):
    bench = new_bench(max_sections=4)
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


def test_a_record_that_is_only_a_covered_tail_goes_whole(new_bench):
    bench = new_bench(max_sections=4)
    bench.put(LONG[:8])
    bench.put(LONG[:9])
    bench.put(LONG[:11])
    assert len(bench.content[Tier.DISK].index) == 2
    assert bench.charged() == 4096 + 2 * 4096 + ONE_PAGE


def test_a_truncation_that_fails_leaves_its_bytes_charged(new_bench):
    bench = new_bench(max_sections=4)
    bench.put(LONG[:6])
    bench.ask(LONG)
    bench.end()
    bench.end("failed", op=JobOp.TRUNCATE)
    assert bench.charged() == 3 * 4096 + 3 * 4096
    assert bench.store.is_idle
