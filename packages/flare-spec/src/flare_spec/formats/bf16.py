"""Owns the head that is not quantised: bf16, with the interface of those that are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flare_spec.formats.row_chunks import project_by_chunks
from flare_spec.formats.weight_checks import check_weight

__all__ = ["Bf16Weight", "round_to_bf16"]


@dataclass(frozen=True, slots=True, eq=False)
class Bf16Weight:
    """A weight [N, K] in bf16."""

    values: torch.Tensor
    """bf16 [N, K]."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes

    def select(self, rows: slice | torch.Tensor) -> Bf16Weight:
        """The weight of some rows: a view for a slice, a copy for indices (int64 [n])."""
        return Bf16Weight(self.values[rows])

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The values as ``dtype`` [N, K]."""
        return self.values.to(dtype)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [M, K] times the weight transposed, in fp32: [M, N]."""
        return project_by_chunks(self, rows)


def round_to_bf16(weight: torch.Tensor) -> Bf16Weight:
    """``weight`` [N, K] (bf16, fp16 or fp32) rounded to bf16; it shares memory with a weight that is bf16 already."""
    check_weight(weight)
    return Bf16Weight(weight.to(torch.bfloat16))
