"""Rejection sampling on shards: the same decisions however the vocabulary is divided, and exact where it is certain."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_core.compute.collectives import SingleRank
from flare_core.compute.sampler import choose_tokens
from flare_core.compute.sampling_state import SampleRow, start_sampling
from flare_core.keys import token_array
from flare_core.sampling import SamplingParams
from flare_core.testing.torch_ranks import run_ranks
from flare_spec.verification.coupled import verify_coupled
from flare_spec.verification.proposals import Candidates, Dense, OneHot
from flare_spec.verification.ratio import verify_ratio
from flare_spec.verification.rows import DraftBatch
from flare_spec.verification.testing import CountingCollectives, spans_of

VOCAB = 80
PROMPT = (1, 2, 3)
CPU = torch.device("cpu")


def params(**fields) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10} | fields))


def sample_row(fields, outputs=()) -> SampleRow:
    known = token_array([*PROMPT, *outputs])
    state = start_sampling(params(**fields), known, len(PROMPT), vocab_size=VOCAB, device=CPU)
    return SampleRow(state, len(known))


def verify(logits, batch, proposal, widths, **options):
    """Accepted drafts and next tokens of each rank, and rank 0's counted collectives."""
    spans = spans_of(widths)

    def body(rank, collectives):
        own, counting = slice(spans[rank].start, spans[rank].stop), CountingCollectives(collectives)
        part = Dense(proposal.logits[:, :, own]) if isinstance(proposal, Dense) else proposal
        got = verify_ratio(logits[:, own].clone(), batch, part, counting, span=spans[rank], vocab_size=VOCAB, **options)
        return got.num_accepted.tolist(), got.next_token.tolist(), counting

    results = run_ranks(len(widths), body)
    return [result[:2] for result in results], results[0][2]


def proposal_of(form, drafts, generator):
    """q as the form has it, with some probability for each draft."""
    shape = (*drafts.shape, VOCAB)
    scores = 2 * torch.randn(shape, generator=generator)
    if form == "one-hot":
        return OneHot()
    if form == "dense":
        return Dense(scores)
    scores.scatter_(2, drafts.unsqueeze(2), 5.0)
    top, ids = scores.topk(7)
    top[:, :, 5:] = -math.inf  # filled up: ids without probability
    return Candidates(ids, top.to(torch.bfloat16))


FIELDS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 5, 70]),
        "top_p": st.sampled_from([1.0, 1.0, 0.3, 0.9]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "logit_bias": st.sampled_from([(), ((4, 3.0), (70, -100.0))]),
        "min_tokens": st.sampled_from([0, 2]),
        "stop_token_ids": st.sampled_from([(), (0, 5, 79)]),
    }
)
token = st.integers(0, VOCAB - 1)
sequences = st.lists(st.tuples(FIELDS, st.lists(token, max_size=2), st.integers(0, 3)), min_size=1, max_size=6)
divisions = st.lists(st.integers(0, VOCAB), min_size=1, max_size=3).map(
    lambda cuts: [b - a for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), VOCAB], strict=True)]
)


@settings(max_examples=100)
@given(sequences, divisions, st.integers(0, 2**32), st.sampled_from(["one-hot", "candidates", "dense"]))
def test_every_rank_decides_as_one_rank_alone_does(drawn, widths, seed, form):
    generator = torch.Generator().manual_seed(seed)
    num_drafts = [count for _, _, count in drawn]
    drafts = torch.randint(0, VOCAB, (len(drawn), 3), generator=generator)
    logits = 2 * torch.randn(sum(num_drafts) + len(drawn), VOCAB, generator=generator)
    proposal = proposal_of(form, drafts, generator)
    batch = DraftBatch([sample_row(fields, outputs) for fields, outputs, _ in drawn], num_drafts, drafts)
    (alone,), _ = verify(logits, batch, proposal, [VOCAB], max_candidates=6)
    results, _ = verify(logits, batch, proposal, widths, max_candidates=6)
    assert results == [alone] * len(widths)


@settings(max_examples=60)
@given(st.lists(st.tuples(FIELDS, st.lists(token, max_size=2)), min_size=1, max_size=6), divisions, st.integers(0, 99))
def test_without_drafts_ordinary_sampling_is_what_comes(drawn, widths, seed):
    logits = 2 * torch.randn(len(drawn), VOCAB, generator=torch.Generator().manual_seed(seed))
    rows = [sample_row(fields, outputs) for fields, outputs in drawn]
    expected = choose_tokens(logits.clone(), rows).tolist()
    batch = DraftBatch(rows, [0] * len(rows), torch.zeros((len(rows), 0), dtype=torch.int64))
    results, _ = verify(logits, batch, OneHot(), widths)
    assert results == [([0] * len(rows), expected)] * len(widths)


def test_greedy_rows_keep_what_the_coupled_rule_keeps_in_one_collective():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(12, VOCAB, generator=generator)
    drafts = logits.view(3, 4, VOCAB)[:, :3].argmax(dim=2)
    drafts[1, 1] += 1
    batch = DraftBatch([sample_row({"temperature": 0.0, "seed": s}) for s in range(3)], [3, 3, 3], drafts)
    coupled = verify_coupled(logits.clone(), batch, SingleRank(), span=spans_of([VOCAB])[0], vocab_size=VOCAB)
    assert coupled.num_accepted.tolist() == [3, 1, 3]
    results, counting = verify(logits, batch, OneHot(), [30, 50])
    assert results[0] == (coupled.num_accepted.tolist(), coupled.next_token.tolist())
    assert counting.num_collectives == 1


def test_a_draft_that_the_target_never_takes_is_never_kept_and_a_certain_one_always():
    logits = torch.zeros(400, VOCAB)
    logits[:, 0::2] = -math.inf
    logits[200:] = -math.inf
    logits[200:, 7] = 1.0
    drafts = torch.tensor([[4]] * 100 + [[7]] * 100)
    rows = [sample_row({"seed": seed}) for seed in range(200)]
    results, _ = verify(logits, DraftBatch(rows, [1] * 200, drafts), OneHot(), [33, 47])
    accepted, tokens = results[0]
    assert accepted == [0] * 100 + [1] * 100
    assert all(token % 2 == 1 for token in tokens)


def test_acceptance_is_one_minus_the_distance_of_the_distributions():
    """Measured over 20,000 sequences within four standard deviations of 1 - TV."""
    num, generator = 20_000, torch.Generator().manual_seed(8)
    target, drafter = (torch.randn(VOCAB, generator=generator) for _ in range(2))
    p, q = torch.softmax(target.double(), 0), torch.softmax(drafter.double(), 0)
    drafts = torch.multinomial(q, num, replacement=True, generator=generator).unsqueeze(1)
    batch = DraftBatch([sample_row({"seed": seed}) for seed in range(num)], [1] * num, drafts)
    proposal = Dense(drafter.expand(num, 1, -1))
    (result,), _ = verify(target.repeat(2 * num, 1), batch, proposal, [VOCAB])
    rate, expected = sum(result[0]) / num, float(torch.minimum(p, q).sum())
    assert abs(rate - expected) < 4 * math.sqrt(expected * (1 - expected) / num)


@pytest.mark.parametrize(
    "proposal",
    [
        Candidates(torch.tensor([[[1, 2]]]), torch.tensor([[[0.0, 0.0]]])),
        Dense(torch.full((1, 1, VOCAB), -math.inf).index_fill_(2, torch.tensor([1]), 0.0)),
    ],
)
def test_a_draft_without_probability_in_its_own_proposal_is_refused(proposal):
    batch = DraftBatch([sample_row({})], [1], torch.tensor([[9]]))
    with pytest.raises(ValueError, match="no probability in its proposal"):
        verify(torch.zeros(2, VOCAB), batch, proposal, [VOCAB])
