"""Owns FP8 weights: E4M3 with one fp32 scale a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flare_spec.formats.e4m3 import E4M3_LARGEST, decode_e4m3, encode_e4m3
from flare_spec.formats.row_chunks import project_by_chunks, row_slices
from flare_spec.formats.weight_checks import check_weight, finite_amax
from flare_spec.kernels.head_products import HeadKind, has_head_product, head_product

__all__ = ["Fp8Weight", "quantise_fp8"]


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A weight [N, K]: element [n, k] is ``codes[n, k] * row_scales[n]``."""

    codes: torch.Tensor
    """float8_e4m3fn [N, K]."""
    row_scales: torch.Tensor
    """fp32 [N]."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.row_scales.nbytes

    def select(self, rows: slice | torch.Tensor) -> Fp8Weight:
        """The weight of some rows: views for a slice, copies for indices (int64 [n])."""
        codes = self.codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return Fp8Weight(codes, self.row_scales[rows])

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The values [N, K], multiplied in fp32 and then rounded to ``dtype``."""
        return decode_e4m3(self.codes).mul_(self.row_scales.unsqueeze(1)).to(dtype)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [M, K] times the weight transposed, in fp32: [M, N]; see :class:`PreparedHead`."""
        if has_head_product(self.codes):
            return head_product(HeadKind.FP8, rows, self.codes, scales=self.row_scales, tensor_scale=None)
        return project_by_chunks(self, rows)


def quantise_fp8(weight: torch.Tensor) -> Fp8Weight:
    """``weight`` [N, K] (bf16, fp16 or fp32) in FP8: a row's scale puts its largest magnitude at 448.

    A row of zeros gets zeros. Raises ``UsageError`` for what :func:`check_weight` refuses, infinities and NaN.
    """
    check_weight(weight)
    finite_amax(weight)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    row_scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    # A tensor, since CUDA multiplies by the reciprocal of a Python number, which rounds differently.
    largest = row_scales.new_full((), E4M3_LARGEST)
    for part in row_slices((weight.shape[0], weight.shape[1]), weight.device):
        values = weight[part].to(torch.float32).contiguous()
        # Below the smallest normal number a scale would lose its digits, and at zero there would be none.
        scales = (values.abs().amax(dim=1) / largest).clamp_(min=torch.finfo(torch.float32).tiny)
        row_scales[part] = scales
        codes[part] = encode_e4m3(values / scales.unsqueeze(1))
    return Fp8Weight(codes.view(torch.float8_e4m3fn), row_scales)
