"""Owns the choice of a head's format: one function from a weight to a prepared head. Knows no drafter or checkpoint."""

from __future__ import annotations

from typing import Protocol, Self

import torch

from flare_spec.formats.bf16 import round_to_bf16
from flare_spec.formats.fp8 import quantise_fp8
from flare_spec.formats.mxfp8 import quantise_mxfp8
from flare_spec.formats.names import HeadFormat, parse_head_format
from flare_spec.formats.nvfp4 import quantise_nvfp4

__all__ = ["PreparedHead", "prepare_head"]


class PreparedHead(Protocol):
    """A weight [N, K] in one of the formats; immutable, on one device."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), in elements."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of elements and scales: what one product reads of the weight."""
        ...

    def select(self, rows: slice | torch.Tensor) -> Self:
        """The head of some rows: views for a slice, copies for indices (int64 [n])."""
        ...

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """All values as ``dtype`` [N, K], rounded once from fp32."""
        ...

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (any float dtype, [M, K]) times the weight transposed: fp32 [M, N], products and sums in fp32.

        On a Hopper GPU a quantised format rounds the rows to 16 bits: see
        :func:`flare_spec.kernels.head_products.head_product`.
        """
        ...


def prepare_head(
    weight: torch.Tensor, head_format: HeadFormat | str, *, amax: torch.Tensor | None = None
) -> PreparedHead:
    """``weight`` [N, K] (bf16, fp16 or fp32, on any device) in ``head_format``, on the same device.

    ``amax`` (fp32 scalar) is the largest magnitude of the tensor of which ``weight`` is a shard along N; NVFP4 alone
    has a scale that depends on it, and with it the shards are those of the whole tensor prepared. Raises ``UsageError``
    for an unknown format and for what the format cannot hold: infinities, NaN, K no multiple of its block.
    """
    match parse_head_format(head_format):
        case HeadFormat.BF16:
            return round_to_bf16(weight)
        case HeadFormat.FP8:
            return quantise_fp8(weight)
        case HeadFormat.NVFP4:
            return quantise_nvfp4(weight, amax=amax)
        case HeadFormat.MXFP8:
            return quantise_mxfp8(weight)
