"""Lengths of verified blocks: what may decide them, and what they are good for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_spec.dspark.scheduling import CostTable, choose_budget, select_lengths, static_length, survivals

# Few distinct values, and ones and zeros among them: ties are where an order goes wrong.
CONFIDENCE = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(0.0, 1.0)
BLOCKS = st.integers(1, 6).flatmap(
    lambda gamma: st.lists(st.lists(CONFIDENCE, min_size=gamma, max_size=gamma), min_size=1, max_size=5)
)


def test_a_threshold_cuts_before_the_first_confidence_below_it():
    assert static_length([0.9, 0.5, 0.4, 0.9], 0.5) == 2
    assert static_length([0.9, 0.5, 0.4, 0.9], 0.0) == 4
    assert static_length([0.1, 0.9], 0.5) == 0
    assert static_length([0.9, math.nan, 0.9], 0.0) == 1


def test_survival_is_the_product_so_far():
    assert survivals([0.5, 0.5, 1.0]) == [0.5, 0.25, 0.25]
    assert survivals([math.nan, 1.0]) == [0.0, 0.0]
    assert survivals([1.5, -1.0]) == [1.0, 0.0]


@given(BLOCKS, st.data())
def test_whether_a_token_is_verified_never_depends_on_what_lies_behind_it(blocks, data):
    budget = data.draw(st.integers(0, 30))
    sequence = data.draw(st.integers(0, len(blocks) - 1))
    gamma = len(blocks[0])
    place = data.draw(st.integers(1, gamma))
    # Drawing token `place` another way changes the confidences after it, and those alone.
    tail = data.draw(st.lists(CONFIDENCE, min_size=gamma - place, max_size=gamma - place))
    changed = [list(block) for block in blocks]
    changed[sequence][place:] = tail
    before, after = select_lengths(blocks, budget)[sequence], select_lengths(changed, budget)[sequence]
    assert (before >= place) == (after >= place)
    threshold = data.draw(CONFIDENCE)
    before, after = static_length(blocks[sequence], threshold), static_length(changed[sequence], threshold)
    assert (before >= place) == (after >= place)


@given(BLOCKS, st.integers(0, 30))
def test_a_budget_goes_to_the_tokens_likeliest_to_be_reached(blocks, budget):
    lengths = select_lengths(blocks, budget)
    assert sum(lengths) == min(budget, sum(map(len, blocks)))
    taken = [value for block, length in zip(blocks, lengths, strict=True) for value in survivals(block)[:length]]
    left = [value for block, length in zip(blocks, lengths, strict=True) for value in survivals(block)[length:]]
    assert not taken or not left or min(taken) >= max(left)


def test_equal_survival_goes_to_the_earlier_place_then_to_the_earlier_sequence():
    assert select_lengths([[1.0, 1.0], [1.0, 1.0]], 3) == [2, 1]
    assert select_lengths([[0.5, 1.0], [1.0, 0.5]], 2) == [1, 1]
    assert select_lengths([], 3) == []
    # A sure second token gives its first no advantage: it was not known when the first was drawn.
    assert select_lengths([[0.5], [0.5, 1.0]], 1) == select_lengths([[0.5], [0.5, 0.3]], 1) == [1, 0]


def test_costs_are_interpolated_and_go_on_at_the_last_slope():
    table = CostTable((1, 3, 5), (1.0, 2.0, 6.0))
    assert [table.cost(count) for count in range(8)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert CostTable((4,), (2.0,)).cost(100) == 2.0


@given(BLOCKS, st.lists(st.floats(0.01, 1.0), min_size=31, max_size=31), st.floats(0.0, 1.0))
def test_a_budget_yields_the_most_tokens_a_second(blocks, steps, draft_seconds):
    count = len(blocks)
    seconds, total = [], 0.0
    for step in steps:
        total += step
        seconds.append(total)
    table = CostTable(tuple(range(1, 32)), tuple(seconds))
    gains = sorted((value for block in blocks for value in survivals(block)), reverse=True)
    rates = [count / table.cost(count)] + [
        (count + math.fsum(gains[:budget])) / (draft_seconds + table.cost(count + budget))
        for budget in range(1, len(gains) + 1)
    ]
    budget = choose_budget(blocks, num_sequences=count, target=table, draft_seconds=draft_seconds)
    assert rates[budget] == pytest.approx(max(rates), rel=1e-9)


def test_drafting_that_does_not_pay_is_turned_off():
    compute_bound = CostTable((1, 100), (1.0, 100.0))
    assert choose_budget([[0.9, 0.8]], num_sequences=1, target=compute_bound, draft_seconds=0.1) == 0
    memory_bound = CostTable((1, 100), (1.0, 1.1))
    assert choose_budget([[0.9, 0.8]], num_sequences=1, target=memory_bound, draft_seconds=0.1) == 2
