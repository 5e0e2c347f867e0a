"""A record that lost its tail or row is stored whole again by a request that brings what it lacks."""

from __future__ import annotations

from flare_cache.jobs import JobOp
from flare_core.prefix import StoreFinished, Tier

LONG = list(range(12))
WHOLE = 4096 + 2 * 4096
"""A record of a page and a tail."""


def cut_tail(bench) -> None:
    """A record of LONG[:6] whose tail was dropped for a longer record that went since."""
    bench.put(LONG[:6])
    bench.put(LONG)
    bench.get(LONG)
    bench.end("failed", op=JobOp.FETCH, last=True)
    bench.run()
    assert bench.store.lookup(bench.query(LONG)).num_tokens == 4


def test_a_lost_tail_is_stored_again_under_the_same_name(new_bench):
    bench = new_bench(max_sections=4)
    cut_tail(bench)
    (cut,) = bench.content[Tier.DISK].index.records()
    ticket = bench.ask(LONG[:6])
    assert bench.ops() == [JobOp.UNLINK]
    assert not bench.store.is_idle
    bench.end()
    (storing,) = bench.script.open
    assert storing.job.op is JobOp.STORE
    assert storing.job.record.key == cut.key
    assert storing.job.record.store_id != cut.identity.store_id
    assert [section.page for section in storing.job.sections] == [0, 50]
    bench.run()
    assert bench.events[ticket] == StoreFinished(ticket, 1)
    assert bench.store.lookup(bench.query(LONG)).num_tokens == 6
    assert bench.charged() == WHOLE
    assert bench.ask(LONG[:6]) is None


def test_a_lost_row_is_stored_again(new_bench):
    bench = new_bench(has_rows=True)
    bench.put(LONG[:4], row=True)
    (cut,) = bench.content[Tier.DISK].index.records()
    bench.content[Tier.DISK].index.truncated(cut, keep_tail=False)
    assert bench.store.lookup(bench.query(LONG)).segments == ()
    assert bench.ask(LONG[:4]) is None
    assert bench.put(LONG[:4], row=True).num_records == 1
    assert bench.store.lookup(bench.query(LONG)).num_tokens == 4


def test_a_cut_record_stays_while_a_transfer_uses_it_or_others_extend_it(new_bench):
    bench = new_bench(has_rows=True)
    bench.put(LONG[:4], row=True)
    bench.put(LONG[:8], row=True)
    first, second = sorted(bench.content[Tier.DISK].index.records(), key=lambda record: record.identity.start)
    for record in (first, second):
        bench.content[Tier.DISK].index.truncated(record, keep_tail=False)
    second.num_pins += 1
    assert bench.ask(LONG[:4], row=True) is None
    assert bench.ask(LONG[:8], row=True) is None
    second.num_pins -= 1
    assert bench.put(LONG[:8], row=True).num_records == 1


def test_a_cut_record_that_cannot_be_unlinked_keeps_its_name(new_bench):
    bench = new_bench(max_sections=4)
    cut_tail(bench)
    ticket = bench.ask(LONG[:6])
    bench.end("failed", op=JobOp.UNLINK)
    assert bench.events[ticket] == StoreFinished(ticket, 0, "failed")
    assert bench.charged() == WHOLE - 4096
    assert bench.store.is_idle
    # Pages of that name are stored by none; longer prompts are.
    assert bench.ask(LONG[:6]) is None
    assert bench.put(LONG).num_records == 1


def test_what_extends_a_record_that_failed_meanwhile_is_not_stored_again(new_bench):
    bench = new_bench(has_rows=True)
    bench.put(LONG[:4], row=True)
    bench.put(LONG[:8], row=True)
    (_, second) = sorted(bench.content[Tier.DISK].index.records(), key=lambda record: record.identity.start)
    bench.content[Tier.DISK].index.truncated(second, keep_tail=False)
    bench.get(LONG[:4])
    ticket = bench.ask(LONG[:8], row=True)
    bench.end("failed", op=JobOp.FETCH)
    bench.run()
    assert bench.events[ticket] == StoreFinished(ticket, 0, "parent")
    assert (bench.charged(), len(bench.content[Tier.DISK].index)) == (0, 0)


def test_a_record_on_its_way_out_goes_once_when_what_it_extends_fails(new_bench):
    bench = new_bench(limit=2 * 8192)
    bench.put(LONG[:8])
    bench.get(LONG[:4])
    bench.ask([7, 7, 7, 7])
    assert bench.ops() == [JobOp.FETCH, JobOp.UNLINK]
    bench.end("failed", op=JobOp.FETCH)
    assert bench.ops() == [JobOp.UNLINK, JobOp.UNLINK]
    bench.run()
    assert bench.charged() == 8192
