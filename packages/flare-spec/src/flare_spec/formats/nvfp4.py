"""Owns NVFP4 weights: E2M1 with an E4M3 scale for 16 elements along K and one fp32 scale. Knows no checkpoint.

The numbers are those of NVIDIA's ModelOpt: elements are divided by, and multiplied with, the fp32 product of the two
scales, the block's being rounded already. Where that product's E4M3 factor would round to zero, the smallest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from flare_core.errors import UsageError
from flare_spec.formats.e2m1 import E2M1_LARGEST, decode_packed_e2m1, encode_e2m1, pack_nibbles
from flare_spec.formats.e4m3 import E4M3_LARGEST, E4M3_SMALLEST, decode_e4m3, encode_e4m3
from flare_spec.formats.row_chunks import project_by_chunks, row_slices
from flare_spec.formats.weight_checks import block_amax, check_weight, finite_amax
from flare_spec.kernels.head_products import HeadKind, has_head_product, head_product

__all__ = ["NVFP4_BLOCK", "Nvfp4Weight", "quantise_nvfp4"]

NVFP4_BLOCK: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Weight:
    """A weight [N, K]: element [n, k] is ``E2M1(code) * (block_scales[n, k // 16] * tensor_scale)``."""

    packed: torch.Tensor
    """uint8 [N, K/2]; the element of an even k lies in the low nibble."""
    block_scales: torch.Tensor
    """float8_e4m3fn [N, K/16], not negative."""
    tensor_scale: torch.Tensor
    """fp32 scalar, to multiply with."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + self.block_scales.nbytes + self.tensor_scale.nbytes

    def select(self, rows: slice | torch.Tensor) -> Nvfp4Weight:
        """The weight of some rows: views for a slice, copies for indices (int64 [n])."""
        scales = self.block_scales.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return Nvfp4Weight(self.packed[rows], scales, self.tensor_scale)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The values [N, K], multiplied in fp32 and then rounded to ``dtype``."""
        values = decode_packed_e2m1(self.packed)
        scales = (decode_e4m3(self.block_scales) * self.tensor_scale).unsqueeze(-1)
        values.view(*self.block_scales.shape, NVFP4_BLOCK).mul_(scales)
        return values.to(dtype)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [M, K] times the weight transposed, in fp32: [M, N]; see :class:`PreparedHead`."""
        if has_head_product(self.packed):
            return head_product(
                HeadKind.NVFP4, rows, self.packed, scales=self.block_scales, tensor_scale=self.tensor_scale
            )
        return project_by_chunks(self, rows)


def quantise_nvfp4(weight: torch.Tensor, *, amax: torch.Tensor | None = None) -> Nvfp4Weight:
    """``weight`` [N, K] (bf16, fp16 or fp32; K a multiple of 16) in NVFP4.

    ``amax`` (fp32 scalar) is the largest magnitude of the tensor of which ``weight`` is a shard along N: quantised with
    it, the shard is that of the whole quantised. By default it is the weight's own. Blocks of zeros get zeros. Raises
    ``UsageError`` for what :func:`check_weight` refuses, infinities, NaN, and an ``amax`` below the weight's own.
    """
    check_weight(weight, block=NVFP4_BLOCK)
    own = finite_amax(weight)
    whole = own if amax is None else amax.to(device=weight.device, dtype=torch.float32).reshape(())
    if not bool((whole >= own) & whole.isfinite()):
        raise UsageError(
            f"amax {float(whole)} is not that of a tensor whose shard reaches {float(own)}; reduce it over all shards"
        )
    # Tensors divide tensors here, since CUDA multiplies by the reciprocal of a Python number, which rounds differently.
    # A scale below the smallest normal number would lose its digits, and at zero there would be none.
    tensor_scale = (whole / whole.new_full((), E2M1_LARGEST * E4M3_LARGEST)).clamp_(min=torch.finfo(torch.float32).tiny)
    num_rows, num_columns = weight.shape
    packed = torch.empty((num_rows, num_columns // 2), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((num_rows, num_columns // NVFP4_BLOCK), dtype=torch.uint8, device=weight.device)
    for part in row_slices((num_rows, num_columns), weight.device):
        values = weight[part].to(torch.float32).contiguous()
        wanted = block_amax(values, NVFP4_BLOCK) / (tensor_scale * E2M1_LARGEST)
        scales[part] = encode_e4m3(wanted.clamp_(min=E4M3_SMALLEST))
        divisors = (decode_e4m3(scales[part]) * tensor_scale).unsqueeze(-1)
        codes = encode_e2m1((values.view(*divisors.shape[:2], NVFP4_BLOCK) / divisors).view(values.shape))
        packed[part] = pack_nibbles(codes)
    return Nvfp4Weight(packed, scales.view(torch.float8_e4m3fn), tensor_scale)
