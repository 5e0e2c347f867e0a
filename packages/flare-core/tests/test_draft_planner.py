"""How many tokens are drafted: never more than allowed, none where they do not pay, again when they might."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_core.engine.config import SchedulerConfig
from flare_core.engine.speculation import AcceptanceEstimate, DraftPlanner, SpeculationLimits, StepCosts
from flare_core.errors import UsageError


def estimate(rate: float) -> AcceptanceEstimate:
    return AcceptanceEstimate(num_accepted=10 * rate, num_decided=10.0)


def costs(**by_rows: float) -> StepCosts:
    made = StepCosts()
    for rows, seconds in by_rows.items():
        made.measured(int(rows.removeprefix("r")), seconds)
    return made


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9)), max_size=40),
    st.integers(1, 8),
    st.dictionaries(st.integers(1, 48), st.floats(1e-4, 1.0), max_size=6),
)
def test_lengths_stay_within_what_is_allowed(sequences, max_drafts, measured) -> None:
    planner = DraftPlanner(SpeculationLimits(max_drafts, max_rows=32))
    for rows, seconds in measured.items():
        planner.costs.measured(rows, seconds)
    lengths = planner.lengths([(estimate(rate), most) for rate, most in sequences])
    assert len(lengths) == len(sequences)
    assert all(0 <= length <= min(max_drafts, most) for length, (_, most) in zip(lengths, sequences, strict=True))
    assert not sum(lengths) or len(lengths) + sum(lengths) <= 32


def test_rows_that_cost_nothing_are_all_used_and_rows_that_cost_a_step_are_not() -> None:
    free = DraftPlanner(SpeculationLimits(5), costs=costs(r1=0.010, r6=0.010))
    assert free.lengths([(estimate(0.5), 9)]) == [5]
    dear = DraftPlanner(SpeculationLimits(5), costs=costs(r1=0.010, r2=0.020, r6=0.060))
    assert dear.lengths([(estimate(0.9), 9)]) == [0]


def test_a_step_of_a_staircase_is_looked_over() -> None:
    """A second row costs a lot and the next ones nothing: worth it only together."""
    planner = DraftPlanner(SpeculationLimits(5), costs=costs(r1=0.010, r2=0.020, r6=0.020))
    assert planner.lengths([(estimate(0.9), 9)]) == [5]


def test_the_likelier_sequence_gets_the_rows() -> None:
    planner = DraftPlanner(SpeculationLimits(8, max_rows=6), costs=costs(r2=0.010, r6=0.010))
    likely, unlikely = planner.lengths([(estimate(0.9), 9), (estimate(0.1), 9)])
    assert likely == 4
    assert unlikely == 0


def test_a_sequence_without_drafts_is_tried_again() -> None:
    planner = DraftPlanner(SpeculationLimits(5), costs=costs(r1=0.010, r2=0.020))
    hopeless = estimate(0.01)
    tried = [step for step in range(2000) if planner.lengths([(hopeless, 9)])[0]]
    assert 5 <= len(tried) <= 8
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert gaps == sorted(gaps)


def test_an_estimate_follows_what_is_seen_and_an_empty_proposal_says_nothing() -> None:
    seen = AcceptanceEstimate()
    before = seen.rate
    seen.verified(0, 0)
    assert seen.rate == before
    for _ in range(40):
        seen.verified(4, 4)
    assert seen.rate > 0.95
    for _ in range(40):
        seen.verified(4, 0)
    assert seen.rate < 0.05


def test_one_slow_step_hardly_changes_a_cost() -> None:
    made = costs(r1=0.010)
    made.measured(1, 5.0)
    assert made.of(1) < 0.012
    made.measured(2, 5.0)
    for _ in range(12):
        made.measured(2, 0.011)
    assert made.of(2) < 0.014


def test_models_with_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="speculation is not possible with a model that keeps rows"):
        SchedulerConfig(
            page_tokens=4, num_pages=8, max_sequences=2, max_model_len=32, vocab_size=10, set_fingerprint=bytes(32),
            has_rows=True, speculation=SpeculationLimits(3),
        )  # fmt: skip
