"""Weights kept a second time in 16 bits, for products of few rows in float32, which memory bandwidth bounds.

Only where that loses nothing: a weight stored as bfloat16 or float16 fits float16 exactly once it is multiplied by a
power of two, which is checked for every value. Products and sums are float32 (fbgemm's kernel), so results are
float32 results; half the bytes are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MAX_ROWS", "HalfWeight", "half_weight", "supports_half_weights"]

MAX_ROWS = 32
"""With more rows a product is bound by arithmetic, and the plain weight is faster (docs/decisions.md)."""

_LARGEST = 2.0**15


@dataclass(frozen=True, slots=True)
class HalfWeight:
    """``weight / unscale`` [out, in] in float16, as fbgemm packs it."""

    packed: Any
    unscale: float

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T / unscale``, float32 [M, out]; the caller multiplies ``unscale`` where it is cheapest."""
        return torch.ops.quantized.linear_dynamic_fp16(rows, self.packed)  # type: ignore[no-any-return]


def supports_half_weights() -> bool:
    """Whether this build of torch has the kernel (x86 with fbgemm)."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_prepack_fp16"
    )


def half_weight(weight: torch.Tensor) -> HalfWeight | None:
    """``weight`` [out, in], float32, in 16 bits; None where it does not fit exactly."""
    largest = float(weight.abs().max())
    if largest == 0.0 or not math.isfinite(largest):
        return None
    scale = 2.0 ** math.floor(math.log2(_LARGEST / largest))
    scaled = weight * scale
    if not torch.equal(scaled.to(torch.float16).to(torch.float32), scaled):
        return None
    return HalfWeight(torch.ops.quantized.linear_prepack_fp16(scaled, None), 1.0 / scale)
