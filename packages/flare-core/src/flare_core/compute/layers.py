"""The parts of a decoder layer as one rank holds them: projections, norms, and what they do to rows.

A single row takes a matrix-vector product (measured twice as fast as a one-row matrix product), so that a row
computed alone has one fixed shape whatever else a step does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

__all__ = ["LayerWeights", "Projection", "project", "project_onto", "rms_norm", "silu_product"]


@dataclass(frozen=True, slots=True)
class Projection:
    """``x @ weight.T + bias``; ``weight`` [out, in], ``bias`` [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer on one rank.

    Attributes:
        attention_norm, mlp_norm: [hidden].
        qkv: queries, keys and values of the rank's heads, one under the other, heads interleaved for rotation.
        head_norm: [query heads + KV heads, D], the Q and K norms repeated for each head, or None.
        output: [hidden, query heads * D]; its bias lies on rank 0 only, because partial results are summed.
        gate_up: gate columns, then up columns; no rows where the rank holds no MLP columns.
        down: [hidden, columns]; bias as ``output``.
    """

    attention_norm: torch.Tensor
    qkv: Projection
    head_norm: torch.Tensor | None
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


def project(rows: torch.Tensor, projection: Projection) -> torch.Tensor:
    """[M, in] to [M, out]."""
    if rows.shape[0] == 1:
        if projection.bias is None:
            return torch.mv(projection.weight, rows[0]).unsqueeze(0)
        return torch.addmv(projection.bias, projection.weight, rows[0]).unsqueeze(0)
    return F.linear(rows, projection.weight, projection.bias)


def project_onto(residual: torch.Tensor, rows: torch.Tensor, projection: Projection) -> torch.Tensor:
    """``residual`` [M, out] plus the projected rows, the sum made inside the product."""
    if rows.shape[0] == 1:
        summed = torch.addmv(residual[0], projection.weight, rows[0]).unsqueeze(0)
    else:
        summed = torch.addmm(residual, rows, projection.weight.t())
    return summed if projection.bias is None else summed.add_(projection.bias)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis (arXiv 1910.07467), the mean in float32 for narrower dtypes."""
    wide = rows.float()
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(rows.shape[-1])
    scaled = wide * mean_square.add_(epsilon).rsqrt_()
    return scaled.to(rows.dtype).mul_(weight) if rows.dtype != torch.float32 else scaled.mul_(weight)


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [M, 2 * columns], written over the gate; [M, columns]."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated: torch.Tensor = F.silu(gate, inplace=True)
    return activated.mul_(up)
