"""The Markov walk: every kind against loops over numbers, and the rounding that verification relies on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_core.compute.layers import Projection
from flare_core.compute.philox import STREAM_DRAFT, STREAM_SAMPLE, gumbel
from flare_spec.dspark.block_sampling import markov_sample_block, top_candidates
from flare_spec.dspark.config import MarkovKind
from flare_spec.dspark.markov import MarkovHead

BATCH, GAMMA, VOCAB, RANK, HIDDEN = 3, 4, 50, 6, 10
KINDS = [MarkovKind.VANILLA, MarkovKind.GATED, MarkovKind.RNN]


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def head_of(kind):
    widths = {MarkovKind.GATED: (RANK, HIDDEN + RANK), MarkovKind.RNN: (3 * RANK, 2 * RANK + HIDDEN)}
    mixer = None
    if kind in widths:
        mixer = Projection(normal(3, *widths[kind]) / 4, normal(4, widths[kind][0]))
    return MarkovHead(kind, normal(1, VOCAB, RANK).bfloat16().float(), normal(2, VOCAB, RANK).bfloat16().float(), mixer)


def inputs(*, temperatures, seed=5):
    return {
        "hidden": normal(seed, BATCH, GAMMA, HIDDEN),
        "anchors": torch.tensor([7, 0, 49]),
        "temperatures": torch.tensor(temperatures),
        "seeds": torch.tensor([1, -(2**63), 12345]),
        "positions": torch.tensor([10, 0, 2**33]),
    }


def base_logits(seed=6):
    return (3 * normal(seed, BATCH, GAMMA, VOCAB)).bfloat16()


def to_bf16(number):
    return torch.tensor(number, dtype=torch.float32).bfloat16().float().item()


def sigmoid(number):
    return 1 / (1 + math.exp(-number))


def naive_operands(head, tokens, rows):
    """What w2 is multiplied by in each slot of one sequence, in Python numbers."""
    state = [0.0] * RANK
    for token, row in zip(tokens, rows.tolist(), strict=True):
        embedding = head.w1[token].tolist()

        def mixed(features):
            return [
                sum(weight * feature for weight, feature in zip(line, features, strict=True)) + bias
                for line, bias in zip(head.mixer.weight.tolist(), head.mixer.bias.tolist(), strict=True)
            ]

        if head.kind is MarkovKind.VANILLA:
            yield embedding
        elif head.kind is MarkovKind.GATED:
            yield [sigmoid(gate) * value for gate, value in zip(mixed(row + embedding), embedding, strict=True)]
        else:
            out = mixed(state + embedding + row)
            keep, new, last = out[:RANK], out[RANK : 2 * RANK], out[2 * RANK :]
            state = [
                sigmoid(gate) * old + (1 - sigmoid(gate)) * math.tanh(value)
                for gate, old, value in zip(keep, state, new, strict=True)
            ]
            yield [math.tanh(value) for value in last]


@pytest.mark.parametrize("kind", KINDS)
def test_a_greedy_block_is_the_argmax_step_by_step(kind):
    head, base, given_ = head_of(kind), base_logits(), inputs(temperatures=[0.0] * BATCH)
    block = markov_sample_block(base, None, head, **given_)
    for index in range(BATCH):
        before = [given_["anchors"][index].item(), *block.tokens[index, :-1].tolist()]
        operands = naive_operands(head, before, given_["hidden"][index])
        assert torch.equal(block.features[index], head.w1[before])
        for slot, operand in enumerate(operands):
            rounded = [to_bf16(value) for value in operand]
            bias = [sum(a * b for a, b in zip(row, rounded, strict=True)) for row in head.w2.tolist()]
            expected = torch.tensor(bias).bfloat16().float() + base[index, slot].float()
            torch.testing.assert_close(block.scores[index, slot].float(), expected, atol=0.05, rtol=0.01)
            assert block.tokens[index, slot] == block.scores[index, slot].float().argmax()


def test_scores_are_rounded_twice_exactly_as_the_contract_says():
    head, base = head_of(MarkovKind.VANILLA), base_logits()
    given_ = inputs(temperatures=[0.0, 1.0, 0.3])
    block = markov_sample_block(base, None, head, **given_)
    for index in range(BATCH):
        before = given_["anchors"][index]
        for slot in range(GAMMA):
            bias = (head.w1[before] @ head.w2.T).bfloat16()
            expected = (base[index, slot].float() + bias.float()).bfloat16()
            # Dot products of six numbers add up in more than one order: at most one bfloat16 step apart.
            assert ((block.scores[index, slot].float() - expected.float()).abs() <= expected.float().abs() / 64).all()
            before = block.tokens[index, slot]
    assert block.scores.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("stream", [STREAM_DRAFT, STREAM_SAMPLE])
def test_tokens_follow_from_the_returned_scores_and_nothing_else(kind, stream):
    head = None if kind is None else head_of(kind)
    for seed in range(20):
        temperatures = [0.0, 1.0, 0.3 + seed]
        given_ = inputs(temperatures=temperatures, seed=seed)
        given_["seeds"] = given_["seeds"] + seed
        block = markov_sample_block(base_logits(seed), None, head, **given_, stream=stream)
        for index, temperature in enumerate(temperatures):
            for slot in range(GAMMA):
                score = block.scores[index, slot].float()
                if temperature:
                    position = given_["positions"][index : index + 1] + slot
                    noise = gumbel(given_["seeds"][index : index + 1], position, torch.arange(VOCAB), stream=stream)
                    score = score / temperature + noise
                assert block.tokens[index, slot] == score.argmax()
    assert block.features.shape == (BATCH, GAMMA, 0 if kind is None else RANK)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_over_all_ids_in_any_order_is_the_dense_block(kind):
    head, base, given_ = head_of(kind), base_logits(), inputs(temperatures=[0.0, 1.0, 2.0])
    dense = markov_sample_block(base, None, head, **given_)
    order = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(n)) for n in range(12)])
    ids = order.view(BATCH, GAMMA, VOCAB)
    listed = markov_sample_block(base.gather(2, ids), ids, head, **given_)
    assert torch.equal(listed.tokens, dense.tokens)
    assert torch.equal(listed.features, dense.features)
    torch.testing.assert_close(listed.scores, dense.scores.gather(2, ids), atol=0.04, rtol=0.01)


def test_candidates_restrict_the_draft_to_themselves_and_padding_is_never_drawn():
    head, base, given_ = head_of(MarkovKind.VANILLA), base_logits(), inputs(temperatures=[0.0, 1.0, 5.0])
    values, ids = top_candidates(base, 8)
    padded = torch.cat([values, torch.full((BATCH, GAMMA, 2), -math.inf).bfloat16()], dim=2)
    padded_ids = torch.cat([ids, torch.zeros(BATCH, GAMMA, 2, dtype=torch.int64)], dim=2)
    block = markov_sample_block(padded, padded_ids, head, **given_)
    assert (block.scores[..., 8:] == -math.inf).all()
    assert (block.tokens.unsqueeze(2) == ids).any(dim=2).all()


def test_ties_go_to_the_lowest_id_wherever_it_stands():
    base = torch.tensor([[[1.0, 5.0, 5.0, 5.0]]]).bfloat16()
    given_ = {name: value[:1] for name, value in inputs(temperatures=[0.0] * BATCH).items()}
    assert markov_sample_block(base, None, None, **given_).tokens.item() == 1
    ids = torch.tensor([[[2, 40, 9, 30]]])
    assert markov_sample_block(base, ids, None, **given_).tokens.item() == 9


def test_nan_is_never_drawn():
    base = torch.full((1, 1, VOCAB), math.nan).bfloat16()
    base[0, 0, 33] = -100.0
    for temperature in (0.0, 1.0):
        given_ = {name: value[:1] for name, value in inputs(temperatures=[temperature] * BATCH).items()}
        block = markov_sample_block(base, None, head_of(MarkovKind.RNN), **given_)
        assert block.tokens.item() == 33
        assert not block.scores.isnan().any()


@given(
    st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 3.0, math.nan]), min_size=1, max_size=40),
    st.integers(1, 45),
)
def test_candidates_are_the_greatest_logits_then_the_lowest_ids(logits, count):
    values, ids = top_candidates(torch.tensor([[logits]]).bfloat16(), count, first_id=1000)
    clean = [-math.inf if math.isnan(value) else value for value in logits]
    ranked = sorted(range(len(clean)), key=lambda column: (-clean[column], column))[:count]
    assert (ids[0, 0] - 1000).tolist() == ranked
    assert values[0, 0].tolist() == [clean[column] for column in ranked]


def test_the_proposal_is_the_softmax_of_the_scores():
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0]).bfloat16()
    count = 20000
    block = markov_sample_block(
        scores.expand(count, 1, 4),
        None,
        None,
        hidden=torch.zeros(count, 1, 1),
        anchors=torch.zeros(count, dtype=torch.int64),
        temperatures=torch.full((count,), 1.5),
        seeds=torch.arange(count),
        positions=torch.full((count,), 9),
    )
    expected = (scores.float() / 1.5).softmax(0) * count
    observed = torch.bincount(block.tokens.flatten(), minlength=4)
    assert ((observed - expected).square() / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001
