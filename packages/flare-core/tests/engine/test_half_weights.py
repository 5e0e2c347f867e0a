"""16-bit copies of weights: made only where they are exact, and float32 in what they give."""

from __future__ import annotations

import pytest
import torch

from flare_core.compute.half_weights import half_weight, supports_half_weights
from flare_core.compute.loading import load_runner

pytestmark = pytest.mark.skipif(not supports_half_weights(), reason="this build of torch has no fbgemm")


@pytest.mark.parametrize("spread", [1e-3, 0.05, 1.0, 300.0])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_16_bit_weight_gives_float32_products(spread, stored, num_rows):
    generator = torch.Generator().manual_seed(1)
    weight = (spread * torch.randn(200, 96, generator=generator)).clamp(-6e4, 6e4).to(stored).float()
    weight[3] = 0.0
    rows = torch.randn(num_rows, 96, generator=generator)
    half = half_weight(weight)
    exact = rows.double() @ weight.double().T
    product = half.product(rows) * half.unscale
    assert product.dtype == torch.float32
    assert float((product - exact).abs().max()) < 3e-6 * 96 * spread
    assert torch.equal(product, half_weight(weight).product(rows) * half.unscale)


def test_a_weight_that_would_be_rounded_has_no_copy():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    assert half_weight(weight) is None
    wide = torch.tensor([[1.0, 2.0**-60]])
    assert half_weight(wide) is None


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_a_weight_without_a_scale_has_no_copy(value):
    assert half_weight(torch.full((4, 4), value)) is None


def test_models_stored_in_bfloat16_have_copies_and_others_have_none(checkpoint, digest_cache):
    stored = load_runner(checkpoint("llama", dtype="bfloat16"), num_pages=4, digest_cache=digest_cache).runner.model
    single = load_runner(checkpoint("llama"), num_pages=4, digest_cache=digest_cache).runner.model
    assert stored.head.half is not None
    assert all(layer.down.half is not None and layer.qkv.half is not None for layer in stored.layers)
    assert single.head.half is None
    assert all(layer.down.half is None for layer in single.layers)
