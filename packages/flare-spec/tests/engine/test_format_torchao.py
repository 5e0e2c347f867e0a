"""MXFP8, NVFP4 and the tiles of scales against torchao, which quantises for the same kernels."""

from __future__ import annotations

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from torchao.prototype.mx_formats.utils import to_blocked

from flare_spec.formats.mxfp8 import Mxfp8Scaling, quantise_mxfp8
from flare_spec.formats.nvfp4 import quantise_nvfp4
from flare_spec.formats.scale_tiles import scales_to_tiles


def random_weight() -> torch.Tensor:
    """Rows of very different size."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-8, 4, (128, 1), generator=generator)
    return torch.randn(128, 512, generator=generator) * torch.exp2(exponents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scaling", "torchao_mode"),
    [(Mxfp8Scaling.RCEIL, ScaleCalculationMode.RCEIL), (Mxfp8Scaling.FLOOR, ScaleCalculationMode.FLOOR)],
)
def test_mxfp8_is_that_of_torchao_bit_for_bit(
    dtype: torch.dtype, scaling: Mxfp8Scaling, torchao_mode: ScaleCalculationMode
) -> None:
    weight = random_weight().to(dtype)
    ours = quantise_mxfp8(weight, scaling=scaling)
    scales, codes = to_mx(weight, torch.float8_e4m3fn, 32, torchao_mode)
    assert torch.equal(ours.block_scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(ours.codes.view(torch.uint8), codes.view(torch.uint8))


def test_nvfp4_is_that_of_torchao_bit_for_bit() -> None:
    # In fp32: torchao multiplies by a reciprocal where ModelOpt divides, and of bf16 many quotients are midpoints.
    weight = random_weight()
    ours = quantise_nvfp4(weight)
    scales, packed = nvfp4_quantize(weight, 16, ours.tensor_scale)
    assert torch.equal(ours.block_scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(ours.packed, packed)


def test_tiles_of_scales_are_those_of_torchao() -> None:
    scales = torch.randint(0, 255, (300, 9), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(scales_to_tiles(scales), to_blocked(scales).flatten())
