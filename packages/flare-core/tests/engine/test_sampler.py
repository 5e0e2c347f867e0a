"""Sampling against a plain reference over the whole vocabulary, one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flare_core.compute import philox
from flare_core.compute.logprobs import LEAST_LOGPROB, raw_logprobs
from flare_core.compute.philox import gumbel, philox4x32
from flare_core.compute.sampler import choose_tokens, clean_
from flare_core.compute.sampling_state import SampleRow, start_sampling
from flare_core.keys import token_array
from flare_core.sampling import SamplingParams

VOCAB = 500
CPU = torch.device("cpu")


def row(params: SamplingParams, *, prompt=(1, 2, 3), outputs=(), vocab=VOCAB) -> SampleRow:
    known = token_array([*prompt, *outputs])
    return SampleRow(start_sampling(params, known, len(prompt), vocab_size=vocab, device=CPU), len(known))


def params(**fields) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10} | fields))


def scalar_philox(counter, key):
    """The algorithm as published, on Python integers."""
    words, keys = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(words[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(words[2] * 0xCD9E8D57, 1 << 32)
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) % (1 << 32), (keys[1] + 0xBB67AE85) % (1 << 32)]
    return words


def scalar_gumbel(seed, position, token):
    counter = (token >> 2, position & 0xFFFFFFFF, position >> 32, 1)
    bits = scalar_philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[token & 3]
    uniform = np.float32((bits + 0.5) * 2.0**-32)
    return -math.log(-math.log1p(-float(uniform))) if uniform < 1 else -math.inf


def reference_choice(logits, sample_row: SampleRow, prompt=(1, 2, 3), outputs=()):
    """Plain Python over the whole vocabulary, in the order that SamplingParams states."""
    p = sample_row.state.params
    scores = [float(value) if not math.isnan(value) else -math.inf for value in logits]
    for token, bias in p.logit_bias:
        scores[token] += bias
    for token in range(len(scores)):
        count = list(outputs).count(token)
        if count or token in prompt:
            scores[token] = (
                scores[token] / p.repetition_penalty if scores[token] > 0 else (scores[token] * p.repetition_penalty)
            )
        scores[token] -= count * p.frequency_penalty + (count > 0) * p.presence_penalty
    if len(outputs) < p.min_tokens:
        for token in p.stop_token_ids:
            scores[token] = -math.inf
    best = max(scores)
    if p.temperature == 0.0:
        return scores.index(best)
    scaled = [(score - best) / p.temperature for score in scores]
    if p.min_p > 0:
        scaled = [score if score >= math.log(p.min_p) else -math.inf for score in scaled]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if 0 < p.top_k < len(order):
        order = order[: p.top_k]
    if p.top_p < 1.0:
        total = math.fsum(math.exp(scaled[token]) for token in order)
        kept, mass = [], 0.0
        for token in order:
            kept.append(token)
            mass += math.exp(scaled[token]) / total
            if mass >= p.top_p:
                break
        order = kept
    noisy = {token: scaled[token] + scalar_gumbel(p.seed, sample_row.position, token) for token in sorted(order)}
    return max(noisy, key=noisy.__getitem__)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_its_known_answers(word, expected):
    one = torch.tensor([word])
    assert [int(value) for value in philox4x32((one, one, one, one), (one, one))] == list(expected)


def test_noise_is_philox_by_seed_position_and_id():
    seeds = torch.tensor([5, -1, 1 << 62])
    positions = torch.tensor([0, 77, (3 << 32) + 9])
    ids = torch.tensor([0, 6, 151_935])
    for got, seed, position, token in zip(gumbel(seeds, positions, ids), seeds, positions, ids, strict=True):
        expected = scalar_gumbel(int(seed) % (1 << 64), int(position), int(token))
        assert float(got) == pytest.approx(expected, rel=1e-5)


def test_an_id_without_a_rival_wins_by_the_worst_noise_too(monkeypatch):
    """A word of all ones makes u round to 1: once in 30 million tokens, here every time."""
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: [(1 << 32) - 1 + 0 * word for word in counter])
    logits = torch.zeros(1, VOCAB)
    logits[0, 30] = 1.0
    assert choose_tokens(logits, [row(params(top_k=1))]).tolist() == [30]


FEATURES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 30.0},
    "nearly-greedy": {"temperature": 1e-30},
    "top-k": {"top_k": 5},
    "top-k-one": {"top_k": 1, "temperature": 2.0},
    "top-p": {"top_p": 0.6, "temperature": 1.5},
    "min-p": {"min_p": 0.2, "temperature": 1.5},
    "all-filters": {"min_p": 0.01, "top_k": 40, "top_p": 0.8, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.8, "frequency_penalty": 0.4, "temperature": 0.9},
    "greedy-penalties": {"repetition_penalty": 3.0, "frequency_penalty": 2.0, "temperature": 0.0},
    "bias": {"logit_bias": ((7, 4.5), (9, -100.0)), "temperature": 0.8},
    "min-tokens": {"min_tokens": 9, "stop_token_ids": (4, 7), "temperature": 0.0, "logit_bias": ((7, 50.0),)},
    "big-seed": {"seed": (1 << 64) - 3},
}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_mixed_batch_chooses_what_the_reference_chooses_row_by_row(seed):
    generator = torch.Generator().manual_seed(seed)
    outputs = (5, 5, 9, 44)
    rows = [
        row(params(**({"seed": 1000 * seed + index} | fields)), outputs=outputs)
        for index, fields in enumerate(FEATURES.values())
    ]
    logits = 3 * torch.randn(len(rows), VOCAB, generator=generator)
    logits[:, 10] = logits[:, 20]
    expected = [reference_choice(line.tolist(), item, outputs=outputs) for line, item in zip(logits, rows, strict=True)]
    assert choose_tokens(logits.clone(), rows).tolist() == expected
    alone = [int(choose_tokens(logits[index : index + 1].clone(), [item])) for index, item in enumerate(rows)]
    assert alone == expected


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "logit_bias": ((3, 0.0),)}]
)
def test_ties_go_to_the_lowest_id(fields):
    logits = torch.zeros(1, VOCAB)
    logits[0, [30, 31, 400]] = 2.0
    assert choose_tokens(logits, [row(params(**fields))]).tolist() == [30]


def test_top_k_keeps_the_lowest_of_equal_ids():
    logits = torch.zeros(64, VOCAB)
    rows = [row(params(top_k=3, seed=seed)) for seed in range(64)]
    assert set(choose_tokens(logits, rows).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5, "top_k": 9}])
def test_nan_counts_as_minus_infinity_and_all_nan_gives_id_zero(fields):
    logits = torch.full((2, VOCAB), math.nan)
    logits[0, 17] = -5.0
    rows = [row(params(**fields)), row(params(**fields))]
    assert choose_tokens(logits, rows).tolist() == [17, 0]


def test_a_top_p_wider_than_the_first_sort_is_still_exact():
    vocab = 4000
    item = row(params(top_p=0.9, temperature=50.0, seed=3), vocab=vocab)
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))
    assert choose_tokens(logits.clone(), [item]).tolist() == [reference_choice(logits[0].tolist(), item)]


def test_drawn_tokens_follow_the_distribution():
    """Chi-squared over 16 ids and 20,000 draws; 15 degrees of freedom, a limit passed once in 10,000 by chance."""
    logits = torch.linspace(0, 3, 16)
    num_draws = 20_000
    rows = [row(params(seed=seed), vocab=16, prompt=(1,)) for seed in range(num_draws)]
    drawn = choose_tokens(logits.repeat(num_draws, 1), rows)
    expected = torch.softmax(logits, 0) * num_draws
    observed = torch.bincount(drawn, minlength=16)
    assert float(((observed - expected) ** 2 / expected).sum()) < 44.3


def test_logprobs_are_raw_with_rank_and_ordered_alternatives():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, -1.0] + [-9.0] * 30])
    raw = raw_logprobs(logits, torch.tensor([3]))
    (entry,) = raw.entries([4])
    expected = torch.log_softmax(logits, -1)[0]
    assert entry.token_id == 3
    assert entry.rank == 3
    assert entry.logprob == pytest.approx(expected[3].item())
    assert [token for token, _ in entry.top] == [1, 2, 3, 0]


def test_logprobs_of_a_row_without_numbers_stay_numbers():
    raw = raw_logprobs(clean_(torch.full((1, 30), math.nan)), torch.tensor([0]))
    assert raw.entries([2])[0].logprob == LEAST_LOGPROB
