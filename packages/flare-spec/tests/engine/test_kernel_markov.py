"""The Markov walk of a GPU against the eager one: bits where sums are exact, and what follows from them everywhere."""

from __future__ import annotations

import math

import pytest
import torch

from flare_core.compute.philox import STREAM_DRAFT, STREAM_SAMPLE, gumbel
from flare_spec.dspark.block_sampling import markov_sample_block
from flare_spec.dspark.config import MarkovKind
from flare_spec.dspark.markov import MarkovHead
from flare_spec.kernels.launch import can_compile
from flare_spec.kernels.markov import has_markov_walk, markov_sample_block_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not can_compile(), reason="needs a CUDA device and NVRTC"),
]
VOCAB = 2000


def make(*, batch, gamma, columns, rank, seed=0, exact=True, dtype=torch.bfloat16):
    """A head, base logits and distinct ids of each slot; ``exact``: integers, whose sums are right in any order."""
    generator = torch.Generator().manual_seed(seed)
    if exact:
        weights = [torch.randint(-3, 4, (VOCAB, rank), generator=generator).float() / 8 for _ in range(2)]
    else:
        weights = [torch.randn(VOCAB, rank, generator=generator) / rank**0.25 for _ in range(2)]
    w1, w2 = (weight.bfloat16().to(dtype).cuda() for weight in weights)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:columns] for _ in range(batch * gamma)])
    base = 3 * torch.randn(batch, gamma, columns, generator=generator)
    head = MarkovHead(MarkovKind.VANILLA, w1, w2, None)
    return head, base.bfloat16().cuda(), ids.view(batch, gamma, columns).cuda()


def keys(batch, temperatures):
    """Arguments by sequence: temperatures in turn, seeds and positions that need all their bits."""
    return {
        "anchors": torch.arange(7, 7 + batch).cuda(),
        "temperatures": torch.tensor([temperatures[index % len(temperatures)] for index in range(batch)]).cuda(),
        "seeds": torch.tensor([(-(2**63), 12345, 2**62 + 11)[index % 3] for index in range(batch)]).cuda(),
        "positions": torch.tensor([(0, 2**33, 2**32 - 2)[index % 3] for index in range(batch)]).cuda(),
    }


def eager(base, ids, head, given, *, stream=STREAM_DRAFT):
    hidden = torch.zeros(*base.shape[:2], 4, device=base.device)
    return markov_sample_block(base, ids, head, hidden=hidden, **given, stream=stream)


SHAPES = [(1, 1, 1, 8), (3, 7, 128, 256), (2, 5, 1000, 64), (5, 3, 1024, 24), (2, 4, 33, 512), (40, 2, 16, 128)]


@pytest.mark.parametrize(("batch", "gamma", "columns", "rank"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stream", [STREAM_DRAFT, STREAM_SAMPLE])
def test_tokens_scores_and_features_are_the_reference_bit_for_bit(batch, gamma, columns, rank, dtype, stream):
    head, base, ids = make(batch=batch, gamma=gamma, columns=columns, rank=rank, dtype=dtype)
    given = keys(batch, [1.0, 0.0, 0.3, 7.5])
    assert has_markov_walk(base, ids, head)
    block = markov_sample_block_cuda(base, ids, head, **given, stream=stream)
    expected = eager(base, ids, head, given, stream=stream)
    assert torch.equal(block.tokens, expected.tokens)
    assert torch.equal(block.scores.view(torch.int16), expected.scores.view(torch.int16))
    assert torch.equal(block.features, expected.features)
    assert block.features.dtype == expected.features.dtype


@pytest.mark.parametrize("temperatures", [[0.0], [0.7], [0.0, 1.0, 3.0]])
def test_with_any_weights_tokens_follow_from_the_returned_scores(temperatures):
    for seed in range(5):
        head, base, ids = make(batch=6, gamma=5, columns=200, rank=256, seed=seed, exact=False)
        given = keys(6, temperatures)
        block = markov_sample_block_cuda(base, ids, head, **given)
        temperature = given["temperatures"].view(-1, 1, 1)
        positions = given["positions"].view(-1, 1, 1) + torch.arange(5, device="cuda").view(-1, 1)
        noise = gumbel(given["seeds"].view(-1, 1, 1), positions, ids, stream=STREAM_DRAFT)
        noisy = block.scores.float() / torch.where(temperature > 0, temperature, 1.0)
        noisy = noisy + noise.masked_fill(temperature <= 0, 0.0)
        best = noisy == noisy.max(dim=2, keepdim=True).values
        assert torch.equal(block.tokens, ids.masked_fill(~best, VOCAB).min(dim=2).values)


def test_with_any_weights_biases_are_those_of_the_reference_or_next_to_them():
    head, base, ids = make(batch=6, gamma=5, columns=200, rank=256, exact=False)
    base = torch.zeros_like(base)  # a score is its bias
    block = markov_sample_block_cuda(base, ids, head, **keys(6, [0.0]))
    before = torch.cat([keys(6, [0.0])["anchors"].unsqueeze(1), block.tokens[:, :-1]], dim=1)
    terms = head.w2[ids].double() * head.w1[before].double().unsqueeze(2)
    exact = terms.sum(dim=3)
    # Sums in float32 of 256 products, then bfloat16: half its step, and what the sum itself may be off.
    bound = exact.abs() * 2.0**-8 + 256 * 2.0**-24 * terms.abs().sum(dim=3)
    assert ((block.scores.double() - exact).abs() <= bound).all()
    assert torch.equal(block.features, head.w1[before])


def test_ties_go_to_the_lowest_id_and_nan_is_minus_infinity():
    head, base, _ = make(batch=1, gamma=2, columns=64, rank=8)
    head = MarkovHead(MarkovKind.VANILLA, head.w1, torch.zeros_like(head.w2), None)
    ids = torch.arange(1000, 936, -1).cuda().expand(1, 2, 64).contiguous()
    base = torch.zeros_like(base)
    base[0, 0, 63] = math.nan
    base[0, 1] = -math.inf
    block = markov_sample_block_cuda(base, ids, head, **keys(1, [0.0]))
    assert block.tokens.tolist() == [[938, 937]]
    assert block.scores[0, 0, 63] == -math.inf
    assert torch.equal(block.scores, eager(base, ids, head, keys(1, [0.0])).scores)


def test_other_heads_and_shapes_are_left_to_the_eager_walk():
    head, base, ids = make(batch=1, gamma=2, columns=16, rank=8)
    assert has_markov_walk(base, ids, head)
    assert not has_markov_walk(base, None, head)
    assert not has_markov_walk(base, ids, None)
    assert not has_markov_walk(base.cpu(), ids.cpu(), head)
    assert not has_markov_walk(base, ids, MarkovHead(MarkovKind.GATED, head.w1, head.w2, None))
    assert not has_markov_walk(base, ids, MarkovHead(MarkovKind.VANILLA, head.w1[:, :6], head.w2[:, :6], None))
    assert not has_markov_walk(base.new_zeros(1, 2, 1025), ids.new_zeros(1, 2, 1025), head)
