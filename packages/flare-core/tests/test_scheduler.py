"""Rules of the scheduler that a random walk may not meet: budgets, ends, restores, refusals."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flare_core.engine.config import SchedulerConfig
from flare_core.engine.request import EngineRequest, Failed, Finished, FinishReason
from flare_core.engine.scheduler import Scheduler
from flare_core.errors import UsageError
from flare_core.keys import token_array
from flare_core.plan import RunKind
from flare_core.prefix import Tier
from flare_core.sampling import SamplingParams
from flare_core.testing.oracle_config import OracleConfig
from flare_core.testing.oracle_reference import oracle_text
from flare_core.testing.oracle_world import OracleWorld

PAGE = 4
CONFIG = OracleConfig()
ROWS = OracleConfig(row_bytes=8)


def settings_of(**changes):
    values = {
        "page_tokens": PAGE,
        "num_pages": 32,
        "max_sequences": 4,
        "max_model_len": 128,
        "vocab_size": CONFIG.vocab_size,
        "set_fingerprint": bytes(32),
        "min_tail_tokens": 0,
    }
    return SchedulerConfig(**(values | changes))


def greedy(max_tokens=4, **changes):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def make_world(config=CONFIG, *, plans=None, **changes):
    world_options = {key: changes.pop(key) for key in ("lead", "with_store", "world_size", "is_late") if key in changes}
    watch = None if plans is None else plans.append
    return OracleWorld(config, settings_of(**changes), watch_plan=watch, **world_options)


def prompt_of(length, seed=3):
    return [(seed * 7 + i * i) % 200 + 3 for i in range(length)]


def test_a_repeated_prompt_hits_all_but_its_last_token_on_the_device():
    world = make_world()
    world.generate(prompt_of(11), greedy())
    outcome = world.generate(prompt_of(11), greedy())
    assert outcome.end.usage.cached_tokens == {Tier.DEVICE: 10}


@pytest.mark.parametrize("config", [CONFIG, ROWS])
@pytest.mark.parametrize("lead", [0, 1])
def test_a_prompt_is_restored_from_the_store_after_the_device_forgot_it(config, lead):
    rows = {"has_rows": True, "num_row_snapshots": 4} if config.row_bytes else {}
    world = make_world(config, with_store=True, lead=lead, is_late=True, **rows)
    cold = world.generate(prompt_of(11), greedy(logprobs=5))
    world.scheduler.reset_device_cache()
    restored = world.generate(prompt_of(11), greedy(logprobs=5))
    assert restored.end.usage.cached_tokens == {Tier.DISK: 10}
    assert restored.logprobs == cold.logprobs
    assert world.scheduler.statistics.hit_tokens[Tier.DISK] == 10


def test_a_conversation_goes_on_where_the_answer_ended():
    world = make_world(with_store=True)
    first = world.generate(prompt_of(9), greedy(6))
    history = [*prompt_of(9), *first.token_ids, 50, 51]
    world.scheduler.reset_device_cache()
    assert world.generate(history, greedy()).end.usage.cached_tokens == {Tier.DISK: 14}
    assert world.generate(history, greedy()).end.usage.cached_tokens == {Tier.DEVICE: 16}


def test_a_request_for_prompt_logprobs_reads_no_cache_and_fills_it():
    world = make_world(with_store=True)
    params = greedy(prompt_logprobs=2)
    for _ in range(2):
        assert world.generate(prompt_of(11), params).end.usage.cached_tokens == {}
    assert world.generate(prompt_of(11), greedy()).end.usage.cached_tokens == {Tier.DEVICE: 10}


def test_nothing_is_handed_to_the_store_twice():
    plans = []
    world = make_world(with_store=True, plans=plans)
    world.generate(prompt_of(11), greedy(1))
    plans.clear()
    world.generate(prompt_of(11), greedy(1))
    assert world.store.num_stores == 2, "prefill and end of the first request"
    assert sum(len(plan.page_copies) for plan in plans) == 2, "the prompt's copy, and the end with one token more"


def test_a_failed_store_is_offered_again():
    world = make_world(with_store=True)
    world.store.faults.fail_store = lambda: True
    world.generate(prompt_of(11), greedy(1))
    assert world.scheduler.statistics.num_store_failures > 0
    world.store.faults.fail_store = lambda: False
    world.generate(prompt_of(11), greedy(1))
    assert world.store.num_stores > 0


def test_short_tails_are_not_stored():
    world = make_world(with_store=True, min_tail_tokens=4)
    world.generate(prompt_of(11), greedy(1))
    world.scheduler.reset_device_cache()
    assert world.generate(prompt_of(11), greedy(1)).end.usage.cached_tokens == {Tier.DISK: 8}


def test_a_fetch_that_brings_less_than_promised_is_completed_by_computing():
    world = make_world(with_store=True)
    world.generate(prompt_of(11), greedy())
    world.scheduler.reset_device_cache()
    world.store.faults.keep_sections = lambda count: count - 1
    assert world.generate(prompt_of(11), greedy()).end.usage.cached_tokens == {Tier.DISK: 8}


def test_a_fetch_that_brings_nothing_leaves_the_devices_share():
    world = make_world(with_store=True)
    world.generate(prompt_of(30), greedy())
    world.scheduler.reset_device_cache()
    world.generate(prompt_of(11), greedy())
    world.store.faults.keep_sections = lambda count: 0
    assert world.generate(prompt_of(30), greedy()).end.usage.cached_tokens == {Tier.DEVICE: 11}


def test_a_fetch_waits_for_the_last_planned_step(monkeypatch):
    plans = []
    world = make_world(with_store=True, lead=1, is_late=True, plans=plans)
    world.generate(prompt_of(11), greedy())
    world.scheduler.reset_device_cache()
    seen = []
    fetch = world.store.fetch
    monkeypatch.setattr(
        world.store, "fetch", lambda *args, **kw: seen.append((kw["after_step"], plans[-1].step)) or fetch(*args, **kw)
    )
    world.add("busy", prompt_of(5, seed=9), greedy(12))
    for _ in range(4):
        world.step()
    world.add("restored", prompt_of(11), greedy())
    world.run_until_rest()
    assert [after == planned for after, planned in seen] == [True]


def test_other_requests_run_while_one_is_being_restored():
    world = make_world(with_store=True)
    world.generate(prompt_of(11), greedy())
    world.scheduler.reset_device_cache()
    world.store.faults.delay_polls = lambda: 1000
    world.add("slow", prompt_of(11), greedy())
    world.add("quick", prompt_of(11, seed=9), greedy())
    for _ in range(20):
        world.step()
    assert world.scheduler.snapshot().fetching == 1
    assert isinstance(world.outcomes["quick"].end, Finished)
    assert world.outcomes["slow"].end is None
    world.run_until_rest()
    assert isinstance(world.outcomes["slow"].end, Finished)


def test_a_request_whose_lookup_is_under_way_holds_no_other_up_and_is_restored_when_it_has_ended():
    world = make_world(with_store=True)
    world.generate(prompt_of(11), greedy())
    world.scheduler.reset_device_cache()
    world.store.faults.lookup_polls = iter([1000, None]).__next__
    world.add("far", prompt_of(11), greedy())
    world.add("near", prompt_of(11, seed=9), greedy())
    for _ in range(20):
        world.step()
    assert (isinstance(world.outcomes["near"].end, Finished), world.scheduler.snapshot().waiting) == (True, 1)
    world.run_until_rest()
    assert world.outcomes["far"].end.usage.cached_tokens[Tier.DISK] > 0


def test_a_request_cancelled_while_its_lookup_is_under_way_is_forgotten():
    world = make_world(with_store=True)
    world.store.faults.lookup_polls = lambda: 5
    world.add("gone", prompt_of(11), greedy())
    world.cancel("gone")
    world.run_until_rest()
    assert world.outcomes["gone"].end.reason is FinishReason.CANCELLED


def test_a_request_cancelled_while_restored_keeps_its_pages_until_the_fetch_is_over():
    world = make_world(with_store=True)
    world.generate(prompt_of(11), greedy())
    world.scheduler.reset_device_cache()
    world.store.faults.delay_polls = lambda: 10
    world.add("gone", prompt_of(11), greedy())
    world.step()
    world.cancel("gone")
    world.step()
    assert world.outcomes["gone"].end.reason is FinishReason.CANCELLED
    assert world.scheduler.snapshot().pages_held == 3
    world.run_until_rest()


def test_a_sequence_being_restored_gives_way_to_an_older_one_that_needs_a_page():
    world = make_world(with_store=True, num_pages=10, max_sequences=2)
    world.generate(prompt_of(16), greedy(1))
    world.scheduler.reset_device_cache()
    world.add("old", prompt_of(13, seed=9), greedy(24))
    world.step()
    world.store.faults.delay_polls = lambda: 40
    world.add("young", prompt_of(16), greedy(4))
    world.run_until_rest()
    assert world.scheduler.statistics.num_preemptions == 1
    assert world.outcomes["young"].end.reason is FinishReason.LENGTH


def test_identical_prompts_that_arrive_together_are_computed_once():
    plans = []
    world = make_world(plans=plans, max_prefill_tokens=8)
    for name in "abc":
        world.add(name, prompt_of(33), greedy())
    world.run_until_rest()
    computed = sum(run.num_tokens for plan in plans for run in plan.runs if run.kind is RunKind.PREFILL)
    assert computed == 32
    assert sum(outcome.end.usage.cached_tokens.get(Tier.DEVICE, 0) for outcome in world.outcomes.values()) == 64


def test_a_decoding_request_gets_a_token_in_every_step_beside_a_long_prefill():
    plans = []
    world = make_world(plans=plans, max_mixed_tokens=8, max_prefill_tokens=64)
    world.add("talker", prompt_of(5), greedy(40))
    for _ in range(4):
        world.step()
    plans.clear()
    world.add("reader", prompt_of(60, seed=9), greedy(2))
    for _ in range(6):
        world.step()
    for plan in plans:
        assert [run.kind for run in plan.runs].count(RunKind.DECODE) == 1
        assert sum(run.num_tokens for run in plan.runs if run.kind is RunKind.PREFILL) <= 8
    world.run_until_rest()


def test_the_last_prompt_token_is_always_a_run_of_its_own():
    plans = []
    world = make_world(plans=plans)
    for length in (1, 2, 5, 9, 9):
        world.generate(prompt_of(length), greedy(1))
        runs = [run for plan in plans for run in plan.runs]
        assert [run.kind for run in runs].count(RunKind.FIRST) == 1
        assert (runs[-1].start, runs[-1].num_tokens) == (length - 1, 1)
        plans.clear()


def test_prefill_of_a_model_with_rows_stops_at_row_points():
    plans = []
    world = make_world(ROWS, plans=plans, has_rows=True, num_row_snapshots=8, row_interval_tokens=8, with_store=True)
    world.generate(prompt_of(20), greedy(1))
    ends = [run.start + run.num_tokens for plan in plans for run in plan.runs if run.kind is RunKind.PREFILL]
    assert ends == [8, 16, 19]
    world.scheduler.reset_device_cache()
    assert world.generate([*prompt_of(17), 9, 9], greedy(1)).end.usage.cached_tokens == {Tier.DISK: 16}


def test_with_lead_one_a_sequence_that_ended_runs_one_step_more_whose_token_is_dropped():
    plans = []
    text = oracle_text(CONFIG, prompt_of(5), greedy(4), page_tokens=PAGE)
    world = make_world(plans=plans, lead=1)
    outcome = world.generate(prompt_of(5), greedy(8, stop_token_ids=(text[2],)))
    assert outcome.token_ids == text[:3]
    assert outcome.end.reason is FinishReason.STOP
    assert outcome.end.usage.completion_tokens == 3
    assert sum(run.kind is not RunKind.PREFILL for plan in plans for run in plan.runs) == 4


def test_with_lead_one_no_step_is_wasted_on_a_length_known_beforehand():
    plans = []
    make_world(plans=plans, lead=1).generate(prompt_of(5), greedy(4))
    assert sum(run.kind is not RunKind.PREFILL for plan in plans for run in plan.runs) == 4


def test_a_preempted_sequence_starts_again_with_its_outputs_and_counts_nothing_twice():
    plans = []
    world = make_world(plans=plans, num_pages=8, max_sequences=2)
    world.add("old", prompt_of(9), greedy(20))
    world.add("young", prompt_of(9, seed=9), greedy(20))
    world.run_until_rest()
    snapshot = world.scheduler.snapshot()
    assert snapshot.num_preemptions > 0
    assert (snapshot.prompt_tokens, snapshot.output_tokens, snapshot.lookup_tokens) == (18, 40, 16)
    restarted = [s for plan in plans for s in plan.starts if len(s.token_ids) // 4 > s.num_prompt_tokens]
    assert restarted
    assert all(start.num_prompt_tokens == 9 for start in restarted)


@given(
    lead=st.sampled_from([0, 1]),
    is_late=st.booleans(),
    with_rows=st.booleans(),
    num_pages=st.integers(5, 9),
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 24)), min_size=2, max_size=5),
    chunk=st.integers(1, 12),
)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_storms_of_preemption_change_no_text(lead, is_late, with_rows, num_pages, lengths, chunk):
    rows = {"has_rows": True, "num_row_snapshots": 2} if with_rows else {}
    world = make_world(
        ROWS if with_rows else CONFIG,
        lead=lead,
        is_late=is_late,
        num_pages=num_pages,
        max_prefill_tokens=chunk,
        max_mixed_tokens=chunk,
        **rows,
    )
    for at, (length, max_tokens) in enumerate(lengths):
        world.add(f"r{at}", prompt_of(length, seed=at), greedy(max_tokens, frequency_penalty=0.5))
    world.run_until_rest(limit=3000)
    assert world.scheduler.statistics.output_tokens == sum(len(o.token_ids) for o in world.outcomes.values())


def test_an_output_ends_where_the_model_or_the_pool_does():
    world = make_world(num_pages=3)
    outcome = world.generate(prompt_of(9), greedy(50))
    assert outcome.end.reason is FinishReason.LENGTH
    assert len(outcome.token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(), "prompt is empty"),
        (prompt_of(128), greedy(), "128 tokens, but at most 127"),
        ([3, 300], greedy(), "token id 300"),
        ([3], greedy(0), "max_tokens is 0"),
    ],
)
def test_a_request_that_can_never_be_served_fails_alone_and_says_why(prompt, params, message):
    world = make_world()
    world.add("good", prompt_of(5), greedy())
    world.add("bad", prompt, params)
    world.run_until_rest()
    assert isinstance(world.outcomes["bad"].end, Failed)
    assert message in world.outcomes["bad"].end.message
    assert isinstance(world.outcomes["good"].end, Finished)


def test_a_request_that_fits_no_longer_because_pages_are_quarantined_fails_with_503():
    world = make_world(num_pages=4)
    pool = world.scheduler.cache.pool
    lost = pool.allocate(2)
    pool.pin(lost)
    pool.quarantine(lost)
    world.add("big", prompt_of(12), greedy(2))
    world.add("small", prompt_of(3), greedy(2))
    for _ in range(10):
        world.step()
    assert world.outcomes["big"].end.status == 503
    assert isinstance(world.outcomes["small"].end, Finished)


def test_an_id_in_use_is_a_fault_of_the_caller():
    scheduler = Scheduler(settings_of())
    request = EngineRequest(request_id="a", token_ids=token_array([5]).tobytes(), params=greedy())
    scheduler.add(request)
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add(request)


def test_a_result_out_of_order_is_a_fault():
    plans = []
    world = make_world(plans=plans)
    scheduler = Scheduler(settings_of())
    scheduler.add(EngineRequest(request_id="a", token_ids=token_array([5]).tobytes(), params=greedy()))
    scheduler.plan(0.0)
    world.generate([5], greedy())
    results = world.group.launch(plans[-1].__class__(step=plans[-1].step + 1)).result()
    with pytest.raises(AssertionError, match="step 1 was due"):
        scheduler.finish_step(results, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_pages": 0}, "num_pages is 0"), ({"row_interval_tokens": 6}, "multiple of page_tokens 4")],
)
def test_settings_that_cannot_work_are_refused_by_name(changes, message):
    with pytest.raises(UsageError, match=message):
        settings_of(**changes)


def test_the_tiers_and_the_misses_add_up_to_the_lookups():
    world = make_world(with_store=True)
    for length in (11, 30, 11):
        world.generate(prompt_of(length), greedy())
    world.scheduler.reset_device_cache()
    world.generate(prompt_of(30), greedy())
    snapshot = world.scheduler.snapshot()
    cached = sum(sum(o.end.usage.cached_tokens.values()) for o in world.outcomes.values())
    assert sum(snapshot.hit_tokens.values()) == cached <= snapshot.lookup_tokens == 10 + 29 + 10 + 29
    assert sum(snapshot.ttft.counts) == snapshot.finished["length"] == 4
