"""The coupled rule emits what sampling from gathered logits emits, however the vocabulary is divided."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_core.compute.collectives import SingleRank
from flare_core.compute.philox import gumbel
from flare_core.compute.sampler import choose_tokens
from flare_core.compute.sampling_state import SampleRow, start_sampling
from flare_core.keys import token_array
from flare_core.sampling import SamplingParams
from flare_core.testing.torch_ranks import run_ranks
from flare_spec.verification.coupled import verify_coupled
from flare_spec.verification.rows import DraftBatch
from flare_spec.verification.testing import CountingCollectives, spans_of

VOCAB = 96
PROMPT = (1, 2, 3, 40)
CPU = torch.device("cpu")


def sample_row(params: SamplingParams, outputs=(), vocab=VOCAB) -> SampleRow:
    known = token_array([*PROMPT, *outputs])
    return SampleRow(start_sampling(params, known, len(PROMPT), vocab_size=vocab, device=CPU), len(known))


def sequential_choices(logits, params, outputs, drafts, vocab=VOCAB):
    """Tokens of ordinary sampling, one call a row, each draft before a row counted as put out."""
    return [
        int(choose_tokens(logits[i : i + 1].clone(), [sample_row(params, [*outputs, *drafts[:i]], vocab)]))
        for i in range(len(drafts) + 1)
    ]


def verify_on_ranks(logits, batch, widths, **options):
    """Every rank's decisions, and its counted collectives."""
    spans = spans_of(widths)

    def body(rank, collectives):
        counting = CountingCollectives(collectives)
        local = logits[:, spans[rank].start : spans[rank].stop].clone()
        verified = verify_coupled(local, batch, counting, span=spans[rank], vocab_size=logits.shape[1], **options)
        return verified, counting

    return run_ranks(len(widths), body)


def pad(drafts):
    width = max(len(item) for item in drafts)
    return torch.tensor([[*item, *[0] * (width - len(item))] for item in drafts], dtype=torch.int64).view(
        len(drafts), width
    )


def expected_of(logits, sequences):
    """(accepted, next token) of each sequence, by ordinary sampling."""
    expected, first = [], 0
    for params, outputs, drafts in sequences:
        choices = sequential_choices(logits[first : first + len(drafts) + 1], params, outputs, drafts, logits.shape[1])
        accepted = 0
        while accepted < len(drafts) and choices[accepted] == drafts[accepted]:
            accepted += 1
        expected.append((accepted, choices[accepted]))
        first += len(drafts) + 1
    return expected


def check(logits, sequences, widths, **options):
    """Decisions equal those of ordinary sampling on every rank; gives the counted collectives of rank 0."""
    rows = [sample_row(params, outputs, logits.shape[1]) for params, outputs, _ in sequences]
    drafts = [drafts for _, _, drafts in sequences]
    batch = DraftBatch(rows, [len(item) for item in drafts], pad(drafts))
    expected = expected_of(logits, sequences)
    results = verify_on_ranks(logits, batch, widths, **options)
    for verified, _ in results:
        pairs = zip(verified.num_accepted.tolist(), verified.next_token.tolist(), strict=True)
        assert list(pairs) == expected
    return results[0][1]


token = st.integers(0, VOCAB - 1)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.just(10),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.0, 1e-30, 0.3, 1.0, 1.0, 1.7, 40.0]),
    top_k=st.sampled_from([0, 0, 0, 1, 3, 20, 70, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1.0, 0.001, 0.5, 0.9, 0.99999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logit_bias=st.lists(
        st.tuples(token, st.sampled_from([-100.0, 2.0, 30.0])), max_size=2, unique_by=lambda p: p[0]
    ).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.lists(token, max_size=3).map(tuple),
)
sequence = st.tuples(sampling, st.lists(token, max_size=3), st.lists(token, max_size=4))
widths = st.lists(st.integers(0, VOCAB), max_size=3).map(
    lambda cuts: [b - a for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), VOCAB], strict=True)]
)


def drawn_logits(num_rows, seed, kind):
    logits = 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.zeros_like(logits)
    elif kind == "holes":
        logits[:, ::3] = -math.inf
        logits[:, 5] = math.nan
        logits[:, 7] = math.inf
    elif kind == "nothing":
        logits[:] = -math.inf
    elif kind == "zeros":
        logits = torch.where(logits > 1, -0.0, torch.where(logits > 0, 0.0, logits))
    return logits


KINDS = ("random", "random", "ties", "equal", "holes", "nothing", "zeros")


def draft_what_comes(logits, sequences, keep):
    """Replace leading drafts by what sampling emits, so that some are accepted."""
    first, redrafted = 0, []
    for (params, outputs, drawn), count in zip(sequences, keep, strict=True):
        drafts = list(drawn)
        for i in range(min(count, len(drafts))):
            row = sample_row(params, [*outputs, *drafts[:i]])
            drafts[i] = int(choose_tokens(logits[first + i : first + i + 1].clone(), [row]))
        redrafted.append((params, outputs, drafts))
        first += len(drafts) + 1
    return redrafted


@settings(max_examples=100)
@given(
    st.lists(st.tuples(sequence, st.integers(0, 5)), min_size=1, max_size=6),
    widths,
    st.integers(0, 2**32 - 1),
    st.sampled_from(KINDS),
    st.sampled_from([1, 4, 64]),
)
def test_decisions_are_those_of_sampling_from_gathered_logits(drawn, widths, seed, kind, max_candidates):
    sequences, keep = [item for item, _ in drawn], [count for _, count in drawn]
    logits = drawn_logits(sum(len(drafts) + 1 for _, _, drafts in sequences), seed, kind)
    check(logits, draft_what_comes(logits, sequences, keep), widths, max_candidates=max_candidates)


def params(**fields) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10} | fields))


@pytest.mark.parametrize("widths", [[96], [40, 56], [10, 0, 86], [0, 32, 33, 31]])
def test_a_rank_may_own_no_ids_and_each_world_size_gives_the_same_tokens(widths):
    sequences = [
        (params(temperature=0.0), (), [4, 5]),
        (params(seed=7, top_p=0.8, repetition_penalty=1.2), (9, 9), [1, 2, 3]),
        (params(seed=8), (), []),
        (params(seed=9, min_p=0.1, top_k=12, temperature=2.0), (5,), [0]),
    ]
    check(
        drawn_logits(10, 3, "random"), draft_what_comes(drawn_logits(10, 3, "random"), sequences, [2, 2, 0, 1]), widths
    )


def test_rows_without_filters_take_one_exchange():
    sequences = [(params(seed=s, temperature=s / 4, presence_penalty=s % 2), (3, 4), [1, 2, 3]) for s in range(8)]
    counted = check(drawn_logits(32, 1, "random"), sequences, [30, 36, 30])
    assert counted.num_collectives == 1
    assert counted.received_bytes == 2 * 32 * 16  # of each other rank, four words a row


@pytest.mark.parametrize(
    ("fields", "num_collectives"),
    [({"min_p": 0.1}, 2), ({"top_k": 20}, 3), ({"top_p": 0.9}, 3), ({"top_k": 30, "top_p": 0.5, "min_p": 0.01}, 3)],
)
def test_filters_take_one_or_two_exchanges_more(fields, num_collectives):
    sequences = [(params(seed=seed, **fields), (), [1, 2]) for seed in range(5)]
    assert check(drawn_logits(15, 2, "random"), sequences, [30, 36, 30]).num_collectives == num_collectives


@pytest.mark.parametrize("fields", [{"top_p": 0.7}, {"top_k": 900}, {"top_k": 1500, "top_p": 0.6, "min_p": 0.001}])
def test_a_cut_behind_the_candidates_is_found_by_histograms(fields):
    """Nearly flat rows: a nucleus of thousands of ids, of which each rank sends 64."""
    logits = torch.randn(12, 4000, generator=torch.Generator().manual_seed(4)).round(decimals=1)
    sequences = [(params(seed=seed, temperature=3.0, **fields), (), [1, 2, 3]) for seed in range(3)]
    counted = check(logits, sequences, [1500, 2500])
    assert counted.num_collectives == (15 if len(fields) == 3 else 9)


def test_a_choice_too_close_to_call_takes_a_second_exchange():
    """Two ids of one rank with the same score to the last bit, next to a rank with a greater logit."""
    seed, vocab = 5, 8
    position = len(PROMPT)
    noise = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.arange(vocab))
    logits = torch.full((1, vocab), -50.0)
    logits[0, 0] = 1.0 - float(noise[0])
    logits[0, 5], logits[0, 6] = 4.0 - noise[5], 4.0 - noise[6]
    counted = check(logits, [(params(seed=seed), (), [])], [4, 4])
    assert counted.num_collectives == 2


@pytest.mark.parametrize(
    ("num_drafts", "drafts", "complaint"),
    [([1, 1], [[1]], "one of each a sequence"), ([2], [[1]], "do not fit drafts"), ([0], [[1]], "1 rows of 96 ids")],
)
def test_batches_whose_parts_do_not_fit_are_refused(num_drafts, drafts, complaint):
    batch = DraftBatch([sample_row(params())], num_drafts, torch.tensor(drafts))
    with pytest.raises(ValueError, match=complaint):
        verify_coupled(torch.zeros(2, VOCAB), batch, SingleRank(), span=spans_of([VOCAB])[0], vocab_size=VOCAB)
