"""What verification exchanges: O(1) numbers a row, whatever the vocabulary; and the same over real sockets."""

from __future__ import annotations

import pytest
import torch

from flare_core.compute.sampling_state import SampleRow, start_sampling
from flare_core.keys import token_array
from flare_core.sampling import SamplingParams
from flare_core.sharding import split_vocab
from flare_core.testing.torch_ranks import run_ranks
from flare_spec.verification.coupled import verify_coupled
from flare_spec.verification.proposals import Candidates, Dense, OneHot
from flare_spec.verification.ratio import verify_ratio
from flare_spec.verification.rows import DraftBatch
from flare_spec.verification.testing import CountingCollectives, connect_threads

CPU = torch.device("cpu")
NUM_SEQUENCES, NUM_DRAFTS = 4, 5
NUM_ROWS = NUM_SEQUENCES * (NUM_DRAFTS + 1)
PLAIN, NUCLEUS = {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}


def case(vocab_size, fields, form):
    """A batch, its logits, whole, and a proposal, whole."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = []
    for seed in range(NUM_SEQUENCES):
        params = SamplingParams(**({"max_tokens": 9, "seed": seed} | fields))
        known = token_array([1, 2, 3])
        rows.append(SampleRow(start_sampling(params, known, 3, vocab_size=vocab_size, device=CPU), 3))
    logits = 4 * torch.randn(NUM_ROWS, vocab_size, generator=generator)
    of_drafts = logits.view(NUM_SEQUENCES, NUM_DRAFTS + 1, -1)[:, :-1]
    scores, ids = (of_drafts + torch.randn(of_drafts.shape, generator=generator)).topk(16)
    proposal = {"one-hot": OneHot(), "candidates": Candidates(ids, scores), "dense": Dense(of_drafts.clone())}[form]
    return DraftBatch(rows, [NUM_DRAFTS] * NUM_SEQUENCES, ids[:, :, 0].contiguous()), logits, proposal


def verify(rule, case, collectives):
    """One rank's decisions, and what it had to receive."""
    batch, logits, proposal = case
    vocab_size = logits.shape[1]
    span = split_vocab(vocab_size, collectives.world_size)[collectives.rank]
    counting = CountingCollectives(collectives)
    local, place = logits[:, span.start : span.stop].clone(), {"span": span, "vocab_size": vocab_size}
    if rule == "coupled":
        return verify_coupled(local, batch, counting, **place), counting
    if isinstance(proposal, Dense):
        proposal = Dense(proposal.logits[:, :, span.start : span.stop])
    return verify_ratio(local, batch, proposal, counting, **place), counting


# Bytes from each other rank. Candidates of top-p: the mass, and 64 keys; sums behind a filter are of rows with drafts.
NUCLEUS_BYTES = NUM_ROWS * (8 + 64 * 8)
EXCHANGES = {
    ("coupled", "one-hot", "plain"): (1, NUM_ROWS * 16),
    ("coupled", "one-hot", "nucleus"): (3, NUM_ROWS * (16 + 8) + NUCLEUS_BYTES),
    ("ratio", "one-hot", "plain"): (2, NUM_ROWS * 20 + NUM_SEQUENCES * 8),
    ("ratio", "candidates", "plain"): (2, NUM_ROWS * 20 + NUM_SEQUENCES * 8),
    ("ratio", "dense", "plain"): (2, NUM_ROWS * 36 + NUM_SEQUENCES * 8),
    ("ratio", "dense", "nucleus"): (
        4,
        NUM_ROWS * 36 + NUCLEUS_BYTES + NUM_SEQUENCES * NUM_DRAFTS * 12 + NUM_SEQUENCES * 8,
    ),
}


@pytest.mark.parametrize("vocab_size", [8192, 49_152])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("how", "expected"), EXCHANGES.items(), ids=["-".join(how) for how in EXCHANGES])
def test_bytes_and_collectives_do_not_grow_with_the_vocabulary(how, expected, world_size, vocab_size):
    rule, form, name = how
    drawn = case(vocab_size, {"plain": PLAIN, "nucleus": NUCLEUS}[name], form)
    num_collectives, from_each = expected
    for _, counting in run_ranks(world_size, lambda rank, collectives: verify(rule, drawn, collectives)):
        assert counting.num_collectives == num_collectives
        assert counting.received_bytes == from_each * (world_size - 1)
    all_gather_bytes = 4 * NUM_ROWS * vocab_size * (world_size - 1) // world_size
    assert counting.received_bytes < all_gather_bytes / (7 if name == "nucleus" else 50)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_exact_way_behind_a_failed_certificate_does_not_grow_either(world_size):
    counted = []
    for vocab_size in (8192, 49_152):
        drawn = case(vocab_size, {"temperature": 30.0, "top_p": 0.9}, "one-hot")
        counted += [c for _, c in run_ranks(world_size, lambda rank, comm, drawn=drawn: verify("coupled", drawn, comm))]
    assert {c.num_collectives for c in counted} == {9}
    beyond = NUM_ROWS * 6 * 512 * 8
    assert {c.received_bytes for c in counted} == {(NUM_ROWS * (16 + 8) + NUCLEUS_BYTES) * (world_size - 1) + beyond}


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_ranks_over_gloo_decide_what_ranks_as_threads_decide(rule):
    """Filters with a certificate and without one, penalties, and every type that is sent."""
    groups = connect_threads(2)
    drawn = [
        case(8192, {"repetition_penalty": 1.2, "top_k": 300, **NUCLEUS}, "dense"),
        case(8192, {"temperature": 20.0, "top_p": 0.8}, "candidates"),
        case(8192, {"temperature": 0.0}, "one-hot"),
    ]

    got = run_ranks(2, lambda rank, _: [verify(rule, item, groups[rank])[0] for item in drawn])
    expected = run_ranks(2, lambda rank, comm: [verify(rule, item, comm)[0] for item in drawn])
    for of_rank in got:
        for one, other in zip(of_rank, expected[0], strict=True):
            assert torch.equal(one.num_accepted, other.num_accepted)
            assert torch.equal(one.next_token, other.next_token)
