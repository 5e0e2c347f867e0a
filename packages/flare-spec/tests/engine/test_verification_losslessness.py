"""Whatever is drafted, what verification emits is distributed as the target; and the test sees known bugs.

``FLARE_TEST_VERIFICATION_DRAWS`` sets the draws of each test (16,000 without it; 1,000,000 take hours).
"""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
import torch

from flare_core.compute.collectives import SingleRank
from flare_core.compute.philox import STREAM_DRAFT, gumbel_span
from flare_core.compute.sampling_state import SampleRow, start_sampling
from flare_core.keys import token_array
from flare_core.sampling import SamplingParams
from flare_core.testing.torch_ranks import run_ranks
from flare_spec.verification import filters, ratio
from flare_spec.verification.proposals import Candidates, Dense, OneHot
from flare_spec.verification.ratio import verify_ratio
from flare_spec.verification.rows import DraftBatch
from flare_spec.verification.testing import connect_threads, goodness_of_fit, spans_of

VOCAB = 64
NUM_POSITIONS = 3
NUM_CLASSES = 4
PROMPT = (9, 30, 7)
CPU = torch.device("cpu")
NUM_CANDIDATES = 16
CHUNK = 16_000
FILTERS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 9},
    "top-p": {"top_p": 0.85},
    "min-p": {"min_p": 0.05, "temperature": 1.2},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.6},
}
WIDTHS = {1: [64], 2: [40, 24], 4: [10, 0, 30, 24]}
FORMS = ("dense", "candidates", "one-hot")
NUM_TESTS = 2 * len(FILTERS) * len(WIDTHS) * len(FORMS)
LEAST_CHANCE = 0.01 / NUM_TESTS
"""One false alarm in a hundred runs of all tests, if seeds changed."""
IMPOSSIBLE = 1e-9


@functools.cache
def models():
    """Logits of the target and of the drafter behind each token, [64, 64] float32."""
    generator = torch.Generator().manual_seed(11)
    target = 1.6 * torch.randn(VOCAB, VOCAB, generator=generator)
    return target, target + 0.8 * torch.randn(VOCAB, VOCAB, generator=generator)


def reference(logits, fields, outputs):
    """Probabilities of the next token, float64 [64], in the order that SamplingParams states."""
    p = SamplingParams(**({"max_tokens": 9} | fields))
    scores = logits.astype(np.float64)
    counts = np.bincount(outputs, minlength=VOCAB) if len(outputs) else np.zeros(VOCAB)
    if p.repetition_penalty != 1.0:
        seen = (counts > 0) | np.isin(np.arange(VOCAB), PROMPT)
        penalised = np.where(scores > 0, scores / p.repetition_penalty, scores * p.repetition_penalty)
        scores = np.where(seen, penalised, scores)
    scores = scores - counts * p.frequency_penalty - (counts > 0) * p.presence_penalty
    weights = np.exp((scores - scores.max()) / p.temperature)
    weights[weights < p.min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    if p.top_k:
        weights[order[p.top_k :]] = 0.0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= p.top_p * weights.sum()]] = 0.0
    return weights / weights.sum()


@functools.cache
def expected_joint(name):
    """Probabilities of three tokens, float64 [64, 64, 64]."""
    target, fields = models()[0].numpy(), FILTERS[name]
    if name != "penalties":
        rows = np.stack([reference(target[token], fields, ()) for token in range(VOCAB)])
        return rows[PROMPT[-1]][:, None, None] * rows[:, :, None] * rows[None]
    joint = np.zeros((VOCAB, VOCAB, VOCAB))
    first = reference(target[PROMPT[-1]], fields, ())
    for a in range(VOCAB):
        second = reference(target[a], fields, (a,))
        for b in range(VOCAB):
            joint[a, b] = first[a] * second[b] * reference(target[b], fields, (a, b))
    return joint


def in_classes(joint):
    """Three tokens as three classes (id modulo 4), [64]."""
    split = joint.reshape(16, 4, 16, 4, 16, 4)
    return split.sum(axis=(0, 2, 4)).ravel()


def draft(form, rows, last, num_drafts, logits=None):
    """Drafts [S, 3] by Gumbel-max with the draft stream, one after the other, and their proposal of the whole row."""
    logits = models()[1] if logits is None else logits
    seeds = torch.tensor([row.state.params.seed for row in rows])
    positions = torch.tensor([row.position for row in rows])
    temperatures = torch.tensor([row.state.params.temperature for row in rows]).unsqueeze(1)
    drafts, scores, ids = [], [], []
    for step in range(max(num_drafts)):
        row = logits[last]
        if form == "candidates":
            row, chosen = row.topk(NUM_CANDIDATES)
            ids.append(chosen)
        noise = gumbel_span(seeds, positions + step, start=0, stop=VOCAB, stream=STREAM_DRAFT)
        if form == "one-hot":
            last = row.argmax(dim=1)
        elif form == "candidates":
            best = (row / temperatures + noise.gather(1, chosen)).argmax(dim=1, keepdim=True)
            last = chosen.gather(1, best).squeeze(1)
        else:
            last = (row / temperatures + noise).argmax(dim=1)
        drafts.append(last)
        scores.append(row)
    drafted = torch.stack(drafts, dim=1)
    if form == "one-hot":
        return drafted, OneHot()
    if form == "candidates":
        return drafted, Candidates(torch.stack(ids, dim=1), torch.stack(scores, dim=1))
    return drafted, Dense(torch.stack(scores, dim=1))


@functools.lru_cache(maxsize=4 * CHUNK)
def fresh_row(seed, name):
    """The first row of a sequence."""
    params = SamplingParams(max_tokens=9, seed=seed, **FILTERS[name])
    known = token_array(PROMPT)
    return SampleRow(start_sampling(params, known, len(PROMPT), vocab_size=VOCAB, device=CPU), len(PROMPT))


def sample_row(seed, outputs, name):
    """The row behind ``outputs``."""
    fresh = fresh_row(seed, name)
    if not outputs or fresh.state.output_counts is None:
        return SampleRow(fresh.state, len(PROMPT) + len(outputs))
    known = token_array([*PROMPT, *outputs])
    state = start_sampling(fresh.state.params, known, len(PROMPT), vocab_size=VOCAB, device=CPU)
    return SampleRow(state, len(known))


def verify_once(outputs, seeds, *, name, form, widths, trim=None, draft_logits=None, groups=None, **options):
    """One round of drafting and verification for sequences with ``outputs``: the tokens that each gets, lists."""
    rows = [sample_row(seed, own, name) for seed, own in zip(seeds, outputs, strict=True)]
    last = torch.tensor([own[-1] if own else PROMPT[-1] for own in outputs])
    num_drafts = [1 + (seed + len(own)) % 3 for seed, own in zip(seeds, outputs, strict=True)]
    drafts, proposal = draft(form, rows, last, num_drafts, draft_logits)
    if trim is not None:
        num_drafts = trim(drafts, num_drafts)
    before = torch.cat([last.unsqueeze(1), drafts], dim=1)
    is_row = torch.arange(before.shape[1]) <= torch.tensor(num_drafts).unsqueeze(1)
    logits = models()[0][before[is_row]]
    batch = DraftBatch(rows, num_drafts, drafts)
    spans = spans_of(widths)

    def body(rank, collectives):
        collectives = groups[rank] if groups else collectives
        own = slice(spans[rank].start, spans[rank].stop)
        part = Dense(proposal.logits[:, :, own]) if isinstance(proposal, Dense) else proposal
        return verify_ratio(
            logits[:, own].clone(), batch, part, collectives, span=spans[rank], vocab_size=VOCAB, **options
        )

    results = run_ranks(len(widths), body) if len(widths) > 1 else [body(0, SingleRank())]
    for result in results[1:]:
        assert torch.equal(result.num_accepted, results[0].num_accepted)
        assert torch.equal(result.next_token, results[0].next_token)
    accepted, following = results[0].num_accepted.tolist(), results[0].next_token.tolist()
    return [[*line[:count], token] for line, count, token in zip(drafts.tolist(), accepted, following, strict=True)]


def draw(num_draws, first_seed=0, **how):
    """The first three tokens of as many sequences, int64 [num_draws, 3]."""
    parts = []
    for start in range(first_seed, first_seed + num_draws, CHUNK):
        seeds = list(range(start, min(start + CHUNK, first_seed + num_draws)))
        texts = [[] for _ in seeds]
        while open_texts := [index for index, text in enumerate(texts) if len(text) < NUM_POSITIONS]:
            outputs = [texts[index] for index in open_texts]
            got = verify_once(outputs, [seeds[index] for index in open_texts], **how)
            for index, tokens in zip(open_texts, got, strict=True):
                texts[index] = texts[index] + tokens
        parts.append(np.array([text[:NUM_POSITIONS] for text in texts]))
    return np.concatenate(parts)


def chances(tokens, joint):
    """Chances of draws like these: of the first token alone, and of all three together."""
    first = np.bincount(tokens[:, 0], minlength=VOCAB)
    cells = (tokens % NUM_CLASSES) @ np.array([NUM_CLASSES**2, NUM_CLASSES, 1])
    together = np.bincount(cells, minlength=NUM_CLASSES**NUM_POSITIONS)
    return goodness_of_fit(first, joint.sum(axis=(1, 2))), goodness_of_fit(together, in_classes(joint))


@functools.cache
def alone(name, form, num_draws):
    """Draws on one rank."""
    return draw(num_draws, name=name, form=form, widths=WIDTHS[1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", WIDTHS)
@pytest.mark.parametrize("name", FILTERS)
def test_emitted_tokens_are_distributed_as_the_target_and_equal_at_every_world_size(name, world_size, form):
    asked = os.environ.get("FLARE_TEST_VERIFICATION_DRAWS")
    # One rank's draws are drawn again by several; by default a fifth of them, to save time.
    num_alone = int(asked or CHUNK)
    tokens = alone(name, form, num_alone)
    if world_size > 1:
        num_draws = num_alone if asked else num_alone // 5
        again = draw(num_draws, name=name, form=form, widths=WIDTHS[world_size], max_candidates=24)
        assert np.array_equal(again, tokens[:num_draws])
        tokens = again
    assert min(chances(tokens, expected_joint(name))) > LEAST_CHANCE


@pytest.mark.parametrize("name", FILTERS)
def test_ranks_over_gloo_draw_the_same(name):
    asked = os.environ.get("FLARE_TEST_VERIFICATION_DRAWS")
    num_draws = min(int(asked), 100_000) if asked else 2000
    again = draw(num_draws, name=name, form="dense", widths=WIDTHS[2], max_candidates=24, groups=connect_threads(2))
    assert np.array_equal(again, alone(name, "dense", int(asked or CHUNK))[:num_draws])


def caught(num_draws=6000, **how):
    """The lowest chance of draws with a planted bug; two ranks, all positions."""
    how = {"name": "temperature", "form": "dense", "widths": WIDTHS[2]} | how
    return min(chances(draw(num_draws, **how), expected_joint(how["name"]))) < IMPOSSIBLE


@pytest.mark.parametrize("form", ["dense", "candidates"])
def test_a_residual_drawn_by_the_noise_of_the_draft_is_caught(monkeypatch, form):
    monkeypatch.setattr(ratio, "STREAM_RESIDUAL", STREAM_DRAFT)
    assert caught(num_draws=12_000, name="top-k", form=form)


@pytest.mark.parametrize("form", FORMS)
def test_a_residual_that_is_not_clipped_is_caught(monkeypatch, form):
    monkeypatch.setattr(ratio, "residual_log_weights", lambda log_p, log_q: (log_p.exp() - log_q.exp()).abs().log())
    assert caught(form=form)


@pytest.mark.parametrize("form", FORMS)
def test_a_correction_by_the_whole_target_is_caught(monkeypatch, form):
    monkeypatch.setattr(ratio, "residual_log_weights", lambda log_p, log_q: log_p)
    assert caught(form=form)


@pytest.mark.parametrize("form", ["dense", "candidates"])
def test_drafts_dropped_for_what_they_are_are_caught(form):
    """The length may depend on what was known before a token was drawn, not on the token."""

    def keep_odd(drafts, num_drafts):
        return [count if token % 2 else 0 for token, count in zip(drafts[:, 0].tolist(), num_drafts, strict=True)]

    assert caught(form=form, trim=keep_odd)


def test_a_nucleus_cut_without_the_exact_way_behind_its_certificate_is_caught(monkeypatch):
    by_candidates = filters._cuts_by_candidates

    def unchecked(*arguments):
        cuts, is_certain = by_candidates(*arguments)
        return cuts, torch.ones_like(is_certain)

    monkeypatch.setattr(filters, "_cuts_by_candidates", unchecked)
    assert caught(name="top-p", max_candidates=3)


def test_an_empty_residual_falls_back_to_the_target_and_without_that_is_caught(monkeypatch):
    """q equal to p to the last bit, and rejections as roundings might make them: all drafts."""
    monkeypatch.setattr(ratio, "_accepts", lambda table, rows, log_p, log_q: log_p > log_p)
    how = {"draft_logits": models()[0]}
    assert not caught(**how)
    monkeypatch.setattr(ratio, "_draw_whole", lambda this, rows, whole: torch.zeros_like(rows))
    assert caught(**how)
