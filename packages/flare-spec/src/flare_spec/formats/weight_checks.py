"""Owns refusals of weights that cannot be quantised. Knows no format beyond the length of its blocks."""

from __future__ import annotations

import torch

from flare_core.errors import UsageError

__all__ = ["block_amax", "check_weight", "finite_amax"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_weight(weight: torch.Tensor, *, block: int = 1) -> None:
    """``UsageError`` unless ``weight`` is a filled [N, K] of bf16, fp16 or fp32, K a multiple of ``block``."""
    if weight.ndim != 2 or weight.numel() == 0:
        raise UsageError(f"a head's weight has shape {tuple(weight.shape)}; it needs two axes, neither empty")
    if weight.dtype not in _DTYPES:
        raise UsageError(f"a head's weight has dtype {weight.dtype}; quantise from {', '.join(map(str, _DTYPES))}")
    if weight.shape[1] % block:
        raise UsageError(
            f"a head's weight of shape {tuple(weight.shape)} cannot be cut into blocks of {block} along its rows; "
            f"use a format without blocks: bf16 or fp8"
        )


def finite_amax(weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in ``weight`` (fp32 scalar, on its device); infinities and NaN raise ``UsageError``."""
    low, high = weight.aminmax()
    amax = torch.maximum(low.abs(), high.abs()).to(torch.float32)
    if not bool(amax.isfinite()):
        raise UsageError("a head's weight holds infinities or NaN; no quantised format keeps them")
    return amax


def block_amax(values: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude (fp32 [n, K/block]) of each block of elements in rows of ``values`` (fp32 [n, K])."""
    return values.view(values.shape[0], -1, block).abs().amax(dim=-1)
