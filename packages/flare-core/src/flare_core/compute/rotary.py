"""Rotary position embedding: frequencies of each scaling, and the rotation as one complex product.

A head's dimensions are stored interleaved (dimension i beside i + D/2), so that rotating is one multiplication by
a complex unit; :func:`interleave` brings projection rows into that order when weights are loaded. Queries and keys
are permuted alike, so scores do not change. Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071) and the
scaling that Llama 3.1 published.
"""

from __future__ import annotations

import math

import torch

from flare_core.compute.model_config import RopeConfig

__all__ = ["Rotary", "interleave", "inverse_frequencies", "rotate_"]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2], float32, and the factor that cosine and sine are multiplied by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim), _yarn_attention_factor(rope)
    return base, 1.0


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between are blended."""
    wave = 2 * math.pi / base
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * base / rope.factor + blend * base
    kept_or_stretched = torch.where(wave > longest, base / rope.factor, base)
    return torch.where((wave >= shortest) & (wave <= longest), blended, kept_or_stretched)


def _yarn(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Interpolated below, extrapolated above, a linear ramp between the two dimensions of beta_slow and beta_fast."""

    def dimension_of(num_rotations: float) -> float:
        ratio = rope.original_max_position / (num_rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (base / rope.factor) * ramp + base * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class Rotary:
    """Turns positions into rotations on one device."""

    def __init__(self, inverse: torch.Tensor, factor: float) -> None:
        self._inverse = inverse
        self._magnitude = torch.tensor(factor, dtype=torch.float32, device=inverse.device)

    @classmethod
    def create(cls, rope: RopeConfig, head_dim: int, device: torch.device) -> Rotary:
        """The rotary embedding of a model on ``device``."""
        inverse, factor = inverse_frequencies(rope, head_dim)
        return cls(inverse.to(device), factor)

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Complex rotations [M, 1, head_dim / 2], complex64, for ``positions`` [M] (float32)."""
        angles = torch.outer(positions, self._inverse).unsqueeze(1)
        return torch.polar(self._magnitude.expand_as(angles), angles)


def rotate_(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """Rotate ``heads`` [M, heads, D] (interleaved, float32 or bfloat16) in place; computed in float32."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations)
    else:
        turned = torch.view_as_complex(pairs.float()).mul_(rotations)
        pairs.copy_(torch.view_as_real(turned))


def interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the first axis [heads * D, ...] within each head: half-split order to interleaved order."""
    split = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape)
