"""What verification is made of: noise, the order of ids, filters on shards, chi-squared chances."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_core.compute.filters import keep_filtered_
from flare_core.compute.philox import STREAM_ACCEPT, STREAM_RESIDUAL, gumbel, gumbel_span, philox4x32, uniform
from flare_core.compute.sampling_state import SampleRow, start_sampling
from flare_core.keys import token_array
from flare_core.sampling import SamplingParams
from flare_core.testing.torch_ranks import run_ranks
from flare_spec.verification.filters import keep_filtered_shards_
from flare_spec.verification.keys import KEY_BITS, lowest_key, order_keys, values_of
from flare_spec.verification.rows import NO_DRAFT, DraftBatch, accept_matching, row_table
from flare_spec.verification.testing import chi_squared_p_value, goodness_of_fit, spans_of
from flare_spec.verification.wire import gather_fields

CPU = torch.device("cpu")
values = st.floats(width=32, allow_nan=False)


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 5))
def test_noise_of_a_span_is_the_noise_of_its_ids(start, width, stream):
    seeds, positions = torch.tensor([3, -9]), torch.tensor([5, 1 << 40])
    ids = torch.arange(start, start + width)
    streams = torch.tensor([stream, STREAM_RESIDUAL])
    expected = gumbel(seeds[:, None], positions[:, None], ids[None], stream=streams[:, None])
    assert torch.equal(gumbel_span(seeds, positions, start=start, stop=start + width, stream=streams), expected)


def test_a_uniform_number_is_the_first_word_of_its_stream():
    seed, position = torch.tensor([77]), torch.tensor([(5 << 32) + 6])
    word = philox4x32((seed * 0, seed * 0 + 6, seed * 0 + 5, seed * 0 + STREAM_ACCEPT), (seed, seed * 0))[0]
    assert float(uniform(seed, position, stream=STREAM_ACCEPT)) == (int(word) + 0.5) * 2.0**-32


@given(st.lists(values, min_size=1, max_size=20), st.integers(0, 1 << 21))
def test_keys_order_by_value_and_then_by_lowest_id(row, start):
    tensor = torch.tensor([row])
    keys = order_keys(tensor, start)
    expected = sorted(range(len(row)), key=lambda index: (-row[index], index))
    assert keys[0].argsort(descending=True).tolist() == expected
    assert torch.equal(values_of(keys), tensor)
    assert lowest_key(CPU) < int(keys.min()) <= int(keys.max()) < 1 << KEY_BITS


FILTERS = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 0, 1, 2, 30, 59]),
        "top_p": st.sampled_from([1.0, 0.2, 0.5, 0.95]),
        "min_p": st.sampled_from([0.0, 0.0, 0.3]),
    }
)


@given(
    st.lists(FILTERS, min_size=1, max_size=5),
    st.lists(st.integers(1, 59), min_size=1, max_size=3, unique=True),
    st.sampled_from([0.0, 0.3, 1.0, 6.0]),
    st.sampled_from([1, 5, 64]),
)
def test_filters_on_shards_leave_what_filters_on_rows_leave(fields, cuts, spread, max_candidates):
    """To the bit, with ties (values of few kinds) and on nearly flat rows."""
    logits = (spread * torch.randn(len(fields), 60, generator=torch.Generator().manual_seed(1))).round(decimals=1)
    scaled = logits - logits.max(dim=1, keepdim=True).values
    params = [SamplingParams(max_tokens=1, **item) for item in fields]
    expected = scaled.clone()
    keep_filtered_(expected, params)
    states = [start_sampling(item, token_array([1]), 1, vocab_size=60, device=CPU) for item in params]
    rows = [SampleRow(state, 1) for state in states]
    table = row_table(DraftBatch(rows, [0] * len(rows), torch.zeros((len(rows), 0), dtype=torch.int64)), 60)
    edges = [0, *sorted(cuts), 60]
    spans = spans_of([b - a for a, b in itertools.pairwise(edges)])

    def body(rank, collectives):
        own = scaled[:, spans[rank].start : spans[rank].stop].clone()
        keep_filtered_shards_(own, table.filters, collectives, start=spans[rank].start, max_candidates=max_candidates)
        return own

    assert torch.equal(torch.cat(run_ranks(len(spans), body), dim=1), expected)


def test_rows_of_sequences_follow_each_other():
    params = SamplingParams(max_tokens=5, seed=2**64 - 1)
    state = start_sampling(params, token_array([1, 2]), 2, vocab_size=9, device=CPU)
    batch = DraftBatch([SampleRow(state, 2), SampleRow(state, 7)], [0, 2], torch.tensor([[8, 8], [3, 4]]))
    table = row_table(batch, 9)
    assert table.positions.tolist() == [2, 7, 8, 9]
    assert table.drafted.tolist() == [NO_DRAFT, 3, 4, NO_DRAFT]
    assert table.seeds.tolist() == [-1] * 4
    assert accept_matching(table, torch.tensor([False, False, True, False])).tolist() == [0, 0]
    assert accept_matching(table, torch.tensor([False, True, True, False])).tolist() == [0, 2]


def test_fields_of_several_types_come_through_one_gather_unchanged():
    fields = [
        torch.tensor([math.nan, -math.inf, 1e-45]),
        torch.tensor([2**31 - 1, -5, 0], dtype=torch.int32),
        torch.tensor([[2**62, -1], [3, 4], [5, 6]]),
        torch.tensor([math.pi, 1e-300, 0.0], dtype=torch.float64),
    ]

    def body(rank, collectives):
        got = gather_fields(collectives, [field if rank == 0 else field.flip(0) for field in fields])
        return got, collectives.num_collectives

    for got, num_collectives in run_ranks(2, body):
        assert num_collectives == 1
        for field, pair in zip(fields, got, strict=True):
            assert pair.dtype == field.dtype
            assert pair[0].contiguous().view(torch.uint8).tolist() == field.contiguous().view(torch.uint8).tolist()
            assert torch.equal(pair[1].nan_to_num(), field.flip(0).nan_to_num())


@pytest.mark.parametrize(
    ("statistic", "num_degrees", "chance"),
    [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (2.0, 10, 0.99634015), (103.442, 63, 0.001), (0.0, 5, 1.0)],
)
def test_chances_of_chi_squared_are_those_of_tables(statistic, num_degrees, chance):
    assert chi_squared_p_value(statistic, num_degrees) == pytest.approx(chance, rel=1e-3)


def test_draws_where_nothing_can_fall_have_no_chance_and_rare_cells_count_together():
    probabilities = torch.tensor([0.5, 0.5, 0.0]).double().numpy()
    assert goodness_of_fit(torch.tensor([5, 5, 1]).numpy(), probabilities) == 0.0
    rare = torch.tensor([0.98, *[0.001] * 20]).double().numpy()
    fair = torch.tensor([980, *[1] * 20]).numpy()
    assert goodness_of_fit(fair, rare) > 0.99
    assert goodness_of_fit(torch.tensor([900, *[5] * 20]).numpy(), rare) < 1e-9
