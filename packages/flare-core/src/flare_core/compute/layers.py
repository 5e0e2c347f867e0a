"""The parts of a decoder layer as one rank holds them: projections, norms, and what they do to rows.

A single row takes a matrix-vector product, so that a row computed alone has one fixed shape whatever else a step
does. Few rows take the weight's 16-bit copy where the loader made one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_core.compute.half_weights import MAX_ROWS, HalfWeight

__all__ = ["LayerWeights", "Projection", "RmsNorm", "project", "project_onto", "rms_norm", "silu_product"]


@dataclass(frozen=True, slots=True)
class Projection:
    """``x @ weight.T + bias``; ``weight`` [out, in], ``bias`` [out] or None, ``half`` the weight in 16 bits or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    half: HalfWeight | None = None


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square norm over the last axis of ``width`` values (arXiv 1910.07467).

    ``x / sqrt(mean(x^2) + epsilon) * weight`` is computed as ``x / hypot(|x|, sqrt(width * epsilon)) * gain`` with
    ``gain = weight * sqrt(width)``: four operations on rows, which is what a single row's time goes into.

    Attributes:
        gain: [..., width], float32.
        floor: sqrt(width * epsilon), a float32 scalar on the device.
    """

    gain: torch.Tensor
    floor: torch.Tensor

    @classmethod
    def create(cls, weight: torch.Tensor, epsilon: float) -> RmsNorm:
        """The norm with ``weight`` [..., width] of any float dtype."""
        width = weight.shape[-1]
        floor = torch.tensor(math.sqrt(width * epsilon), dtype=torch.float32, device=weight.device)
        return cls(weight.float() * math.sqrt(width), floor)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer on one rank.

    Attributes:
        attention_norm, mlp_norm: over [hidden].
        qkv: queries, keys and values of the rank's heads, one under the other, heads interleaved for rotation.
        head_norm: over [query heads + KV heads, D], the Q and K norms repeated for each head, or None.
        output: [hidden, query heads * D]; its bias lies on rank 0 only, because partial results are summed.
        gate_up: gate columns, then up columns; no rows where the rank holds no MLP columns.
        down: [hidden, columns]; bias as ``output``.
    """

    attention_norm: RmsNorm
    qkv: Projection
    head_norm: RmsNorm | None
    output: Projection
    mlp_norm: RmsNorm
    gate_up: Projection
    down: Projection


def project(rows: torch.Tensor, projection: Projection) -> torch.Tensor:
    """[M, in] to [M, out]."""
    half = projection.half
    if half is not None and rows.shape[0] <= MAX_ROWS:
        product = half.product(rows if half.unscale == 1.0 else rows * half.unscale)
        return product if projection.bias is None else product.add_(projection.bias)
    if rows.shape[0] == 1:
        if projection.bias is None:
            return torch.mv(projection.weight, rows[0]).unsqueeze(0)
        return torch.addmv(projection.bias, projection.weight, rows[0]).unsqueeze(0)
    return F.linear(rows, projection.weight, projection.bias)


def project_onto(residual: torch.Tensor, rows: torch.Tensor, projection: Projection) -> torch.Tensor:
    """``residual`` [M, out] plus the projected rows."""
    half = projection.half
    if half is not None and rows.shape[0] <= MAX_ROWS:
        summed = torch.add(residual, half.product(rows), alpha=half.unscale)
    elif rows.shape[0] == 1:
        summed = torch.addmv(residual[0], projection.weight, rows[0]).unsqueeze(0)
    else:
        summed = torch.addmm(residual, rows, projection.weight.t())
    return summed if projection.bias is None else summed.add_(projection.bias)


def rms_norm(rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """``rows`` [..., width] normalised, computed in float32, in the dtype of ``rows``."""
    wide = rows if rows.dtype == torch.float32 else rows.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    normed = wide.div(torch.hypot(length, norm.floor)).mul_(norm.gain)
    return normed if rows.dtype == torch.float32 else normed.to(rows.dtype)


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [M, 2 * columns], written over the gate; [M, columns]."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated: torch.Tensor = F.silu(gate, inplace=True)
    return activated.mul_(up)
