"""Owns MXFP8 weights: E4M3 with one E8M0 scale for 32 elements along K (OCP MX v1.0)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import torch

from flare_spec.formats.e4m3 import E4M3_LARGEST, decode_e4m3, encode_e4m3
from flare_spec.formats.e8m0 import E8M0Rounding, decode_e8m0, encode_e8m0
from flare_spec.formats.row_chunks import project_by_chunks, row_slices
from flare_spec.formats.weight_checks import block_amax, check_weight, finite_amax
from flare_spec.kernels.head_products import HeadKind, has_head_product, head_product

__all__ = ["MXFP8_BLOCK", "Mxfp8Scaling", "Mxfp8Weight", "quantise_mxfp8"]

MXFP8_BLOCK: Final = 32
_E4M3_MAX_EXPONENT: Final = 8  # of 448, E4M3's largest


class Mxfp8Scaling(enum.StrEnum):
    """Which power of two becomes a block's scale."""

    RCEIL = "rceil"
    """The smallest that brings the block's largest magnitude to at most 448, as cuBLAS does: nothing is clipped."""
    FLOOR = "floor"
    """That of the largest magnitude less E4M3's largest exponent, as in OCP MX v1.0, section 6.3: what comes to more
    than 448 is clipped to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp8Weight:
    """A weight [N, K]: element [n, k] is ``codes[n, k] * block_scales[n, k // 32]``."""

    codes: torch.Tensor
    """float8_e4m3fn [N, K]."""
    block_scales: torch.Tensor
    """float8_e8m0fnu [N, K/32]."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.block_scales.nbytes

    def select(self, rows: slice | torch.Tensor) -> Mxfp8Weight:
        """The weight of some rows: views for a slice, copies for indices (int64 [n])."""
        codes = self.codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return Mxfp8Weight(codes, self.block_scales.view(torch.uint8)[rows].view(torch.float8_e8m0fnu))

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The values [N, K], multiplied in fp32 and then rounded to ``dtype``."""
        values = decode_e4m3(self.codes)
        scales = decode_e8m0(self.block_scales).unsqueeze(-1)
        values.view(*self.block_scales.shape, MXFP8_BLOCK).mul_(scales)
        return values.to(dtype)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [M, K] times the weight transposed, in fp32: [M, N]; see :class:`PreparedHead`."""
        if has_head_product(self.codes):
            return head_product(HeadKind.MXFP8, rows, self.codes, scales=self.block_scales, tensor_scale=None)
        return project_by_chunks(self, rows)


def quantise_mxfp8(weight: torch.Tensor, *, scaling: Mxfp8Scaling = Mxfp8Scaling.RCEIL) -> Mxfp8Weight:
    """``weight`` [N, K] (bf16, fp16 or fp32; K a multiple of 32) in MXFP8.

    A block of zeros gets zeros and the smallest scale. Raises ``UsageError`` for what :func:`check_weight` refuses,
    infinities and NaN.
    """
    check_weight(weight, block=MXFP8_BLOCK)
    finite_amax(weight)
    num_rows, num_columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty((num_rows, num_columns // MXFP8_BLOCK), dtype=torch.uint8, device=weight.device)
    for part in row_slices((num_rows, num_columns), weight.device):
        values = weight[part].to(torch.float32).contiguous()
        scales[part] = _scale_codes(block_amax(values, MXFP8_BLOCK), scaling)
        # The reciprocal of a power of two is exact, and its code is the mirror image.
        inverse = decode_e8m0(254 - scales[part]).unsqueeze(-1)
        codes[part] = encode_e4m3((values.view(*inverse.shape[:2], MXFP8_BLOCK) * inverse).view(values.shape))
    return Mxfp8Weight(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))


def _scale_codes(amax: torch.Tensor, scaling: Mxfp8Scaling) -> torch.Tensor:
    match scaling:
        case Mxfp8Scaling.RCEIL:
            # The divisor is a tensor, since CUDA multiplies by the reciprocal of a Python number: up to one unit in
            # the last place more, and so a whole power of two.
            return encode_e8m0(amax / amax.new_full((), E4M3_LARGEST), E8M0Rounding.UP)
        case Mxfp8Scaling.FLOOR:
            exponents = encode_e8m0(amax, E8M0Rounding.DOWN).to(torch.int32) - _E4M3_MAX_EXPONENT
            return exponents.clamp_(min=0).to(torch.uint8)
