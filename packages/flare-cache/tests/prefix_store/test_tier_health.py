"""A full disk pauses stores, a failing one ends reads or stores; both on every rank, whichever rank has it."""

from __future__ import annotations

import pytest

from flare_cache.jobs import JobOp
from flare_cache.tier_health import BAD_DIGEST_SECONDS, READ_ERROR_SECONDS, RETRY_SECONDS
from flare_core.prefix import StoreFinished, Tier

FULL = "ENOSPC: No space left on device"


def prompt(number: int) -> list[int]:
    return [100 * number + at for at in range(4)]


def health(bench, tier: Tier = Tier.DISK):
    statistics = bench.store.statistics().tiers[tier]
    return statistics.stores_stopped, statistics.reads_stopped


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EFBIG", "EMFILE", "EROFS", "ENOENT"])
def test_a_rank_without_a_place_pauses_stores_until_one_succeeds(new_bench, code):
    bench = new_bench()
    failed = bench.ask(prompt(1))
    bench.end("failed", reason=f"{code}: no", rank=0)
    assert bench.events[failed] == StoreFinished(failed, 0, f"rank 0: {code}: no")
    assert health(bench) == (f"paused, as rank 0 had no place: {code}: no", None)
    bench.now += RETRY_SECONDS / 2
    assert bench.ask(prompt(1)) is None
    assert bench.ops() == []
    assert bench.store.is_idle
    bench.now += RETRY_SECONDS / 2
    assert bench.put(prompt(1)).num_records == 1
    assert health(bench) == (None, None)
    assert bench.put(prompt(2)).num_records == 1
    assert bench.store.statistics().stores_dropped == {"failed": 1, "paused": 1}


def test_while_one_store_tries_whether_there_is_room_no_other_begins(new_bench):
    bench = new_bench()
    bench.ask(prompt(1))
    bench.end("failed", reason=FULL)
    bench.now += RETRY_SECONDS
    trying = bench.ask(prompt(2))
    assert bench.ask(prompt(3)) is None
    bench.end("failed", reason=FULL)
    assert bench.events[trying].failure == f"rank 1: {FULL}"
    assert bench.ask(prompt(3)) is None
    bench.now += RETRY_SECONDS
    assert bench.put(prompt(3)).num_records == 1


def test_an_attempt_that_never_began_or_failed_otherwise_is_followed_by_another(new_bench):
    bench = new_bench()
    bench.ask(prompt(1))
    bench.end("failed", reason=FULL)
    bench.now += RETRY_SECONDS
    for how in ("late", "failed"):
        assert bench.ask(prompt(2)) is not None
        bench.end(how)
        assert health(bench)[0] is not None
    assert bench.put(prompt(2)).num_records == 1
    assert health(bench)[0] is None


def test_what_waits_for_its_turn_when_a_disk_is_full_is_given_up_and_what_began_goes_on(new_bench):
    bench = new_bench(limit=2 * 8192)
    bench.put(prompt(1))
    begun = bench.ask(prompt(2))
    bench.get(prompt(1))
    waiting = bench.ask(prompt(3))  # for room that only the pinned record could give
    bench.poll()
    assert bench.events[waiting].failure == "full"
    last = bench.ask(prompt(4))
    assert last is not None
    bench.end("failed", op=JobOp.STORE, reason=FULL)
    bench.poll()
    bench.run()
    assert bench.events[begun].failure == f"rank 1: {FULL}"


def test_a_store_that_began_before_the_pause_does_not_end_it(new_bench):
    bench = new_bench()
    first, second = bench.ask(prompt(1)), bench.ask(prompt(2))
    bench.end("failed", reason=FULL)
    bench.end("done")
    assert bench.events[first].num_records + bench.events[second].num_records == 1
    assert health(bench)[0] is not None
    assert bench.ask(prompt(3)) is None


def test_the_other_tier_stores_on(new_bench):
    bench = new_bench(tiers=(Tier.MEMORY, Tier.DISK))
    bench.ask(prompt(1))
    (disk,) = [waiting for waiting in bench.script.open if waiting.job.tier is Tier.DISK]
    bench.script.end(disk, "failed", reason=FULL)
    bench.run()
    assert bench.put(prompt(2)).num_records == 1
    assert bench.get(prompt(2)) is not None
    assert bench.script.open[0].job.tier is Tier.MEMORY
    assert health(bench, Tier.MEMORY) == (None, None)


def test_a_directory_that_takes_nothing_any_more_ends_stores_for_good(new_bench):
    bench = new_bench()
    bench.put(prompt(1))
    bench.ask(prompt(2))
    bench.end("failed", reason="stores-stopped: fsync failed: Input/output error")
    assert health(bench) == ("rank 1: stores-stopped: fsync failed: Input/output error", None)
    bench.now += 1e6
    assert bench.ask(prompt(3)) is None
    assert bench.store.lookup(bench.query(prompt(1))).num_tokens == 4
    assert bench.store.statistics().stores_dropped == {"failed": 1, "stopped": 1}


def fail_fetch(bench, number: int, reason: str, rank: int = 1) -> None:
    bench.get(prompt(number))
    bench.end("failed", op=JobOp.FETCH, reason=reason, rank=rank)
    bench.run()


def filled(new_bench, num_records: int = 8):
    bench = new_bench()
    for number in range(num_records):
        bench.put(prompt(number))
    return bench


def test_three_failed_reads_of_a_rank_within_a_minute_end_reads_of_the_tier(new_bench, caplog):
    bench = filled(new_bench)
    for number in range(3):
        assert bench.store.lookup(bench.query(prompt(7))).num_tokens == 4
        fail_fetch(bench, number, "read-error: EIO at offset 4096")
        bench.now += READ_ERROR_SECONDS / 3
    stopped, reads = health(bench)
    assert stopped is None
    assert reads.startswith("rank 1 failed to read 3 times within 60 s, last: read-error: EIO")
    assert bench.store.lookup(bench.query(prompt(7))).segments == ()
    assert caplog.text.count("not read any more") == 1
    assert bench.put(prompt(20)).num_records == 1


def test_failed_reads_of_several_ranks_or_over_a_longer_time_do_not_add_up(new_bench):
    bench = filled(new_bench)
    for number in range(4):
        fail_fetch(bench, number, "read-error: EIO at offset 0", rank=number % 2)
    bench = filled(new_bench)
    for number in range(5):
        fail_fetch(bench, number, "read-error: EIO at offset 0")
        bench.now += READ_ERROR_SECONDS / 2 + 1
    assert health(bench) == (None, None)
    assert bench.store.lookup(bench.query(prompt(7))).num_tokens == 4


def test_three_records_of_other_bytes_than_were_written_end_stores(new_bench):
    bench = filled(new_bench)
    for number, problem in enumerate(("section-digest", "header-digest", "section-digest")):
        assert health(bench)[0] is None
        fail_fetch(bench, number, f"{problem}: section 0")
        bench.now += BAD_DIGEST_SECONDS / 3
    stopped, reads = health(bench)
    assert stopped.startswith("rank 1 returned other bytes than were written for 3 records within 600 s")
    assert reads is None
    assert bench.ask(prompt(30)) is None
    assert bench.store.lookup(bench.query(prompt(7))).num_tokens == 4


def test_the_same_record_twice_or_bad_records_far_apart_end_nothing(new_bench):
    bench = filled(new_bench)
    for _ in range(3):
        fail_fetch(bench, 0, "section-digest: section 0")
        bench.put(prompt(0))
    for number in range(1, 5):
        bench.now += BAD_DIGEST_SECONDS + 1
        fail_fetch(bench, number, "section-digest: section 0")
    assert health(bench) == (None, None)


def test_missing_and_foreign_records_are_no_fault_of_a_disk(new_bench):
    bench = filled(new_bench)
    for number, problem in enumerate(("missing", "truncated", "other-record", "other-set", "missing", "missing")):
        fail_fetch(bench, number, f"{problem}: it")
    assert health(bench) == (None, None)


def test_a_failed_cleanup_is_counted_and_told_with_the_store(new_bench, caplog):
    bench = new_bench()
    ticket = bench.ask(prompt(1))
    bench.end("unclean")
    kept = "rank 1: EIO: broken (and what was written could not be removed: rank 1: EIO: broken)"
    assert bench.events[ticket].failure == kept
    assert kept in caplog.text
    times = bench.store.statistics().job_times[1]
    assert (times[JobOp.STORE].failures, times[JobOp.UNLINK].failures) == ({"EIO": 1}, {"EIO": 1})
    assert bench.charged() == 8192
