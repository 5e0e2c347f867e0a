"""The prefix store under random requests and outcomes: every ticket ends, and no byte is lost or charged twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.jobs import JobOp
from flare_core.prefix import Tier

OUTCOMES = {
    JobOp.STORE: ["done", "done", "done", "failed", "unclean", "late"],
    JobOp.FETCH: ["done", "done", "failed", "cancelled"],
    JobOp.TRUNCATE: ["done", "done", "failed"],
    JobOp.UNLINK: ["done", "done", "done", "failed"],
}


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans(), st.integers(3, 12))
def test_whatever_becomes_of_jobs_every_ticket_ends_and_the_books_balance(new_bench, data, has_rows, limit_pages):
    bench = new_bench(limit=limit_pages * 4096, max_sections=data.draw(st.integers(1, 3)), has_rows=has_rows)
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


def check_books(bench) -> None:
    content = bench.content[Tier.DISK]
    assert 0 <= content.budget.charged_bytes <= content.budget.limit_bytes
    stored = [record for record in content.index.records() if record.is_stored]
    assert content.budget.charged_bytes >= sum(record.num_bytes for record in stored)
    for record in content.index.records():
        if record.is_usable and record.parent is not None:
            assert record.parent.is_usable
            assert content.index.get(record.parent.key) is record.parent
            assert not record.is_stored or record.parent.is_stored
