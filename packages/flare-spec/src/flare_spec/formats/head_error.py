"""Owns the estimate of what a head's format costs. Knows no drafter: it compares two vocabularies of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from flare_core.errors import UsageError
from flare_spec.formats.bf16 import round_to_bf16
from flare_spec.formats.heads import PreparedHead

__all__ = ["HeadError", "head_error"]

_LOGITS_AT_ONCE: Final = 1 << 25


@dataclass(frozen=True, slots=True)
class HeadError:
    """How far a prepared head's logits are from those of the same head in bf16."""

    relative_logit_error: float
    """Root of the summed squares of the differences over that of the bf16 logits."""
    top1_agreement: float
    """Share of rows whose greatest logit is at the same place."""
    mean_total_variation: float
    """Mean over rows of the total variation of the two softmaxes (temperature 1): at most this much of the acceptance
    rate is lost at a position, since acceptance is one less the variation between draft and target."""


def head_error(weight: torch.Tensor, prepared: PreparedHead, rows: torch.Tensor) -> HeadError:
    """The error of ``prepared``, made from ``weight`` [N, K], on ``rows`` (hidden states, any float dtype, [M, K]).

    Both heads see the same rows, and multiply in fp32. Reads the weights once for each 2**25 logits or less.
    """
    if prepared.shape != tuple(weight.shape):
        raise UsageError(
            f"a prepared head of shape {prepared.shape} was not made from a weight of {tuple(weight.shape)}"
        )
    if rows.ndim != 2 or rows.shape[0] == 0:
        raise UsageError(f"rows of shape {tuple(rows.shape)}; an error is estimated from at least one row [M, K]")
    exact = round_to_bf16(weight)
    # Sums of [squared differences, squared logits, rows that agree, total variations], in fp64 on the device.
    sums = torch.zeros(4, dtype=torch.float64, device=rows.device)
    step = max(1, _LOGITS_AT_ONCE // weight.shape[0])
    for start in range(0, rows.shape[0], step):
        batch = rows[start : start + step]
        sums += _sums(exact.project(batch), prepared.project(batch))
    difference, square, agreeing, variation = sums.tolist()
    return HeadError(
        relative_logit_error=(difference / square) ** 0.5 if square else 0.0,
        top1_agreement=agreeing / rows.shape[0],
        mean_total_variation=variation / rows.shape[0],
    )


def _sums(exact: torch.Tensor, approximate: torch.Tensor) -> torch.Tensor:
    difference = (approximate - exact).square().sum(dtype=torch.float64)
    square = exact.square().sum(dtype=torch.float64)
    agreeing = (exact.argmax(dim=1) == approximate.argmax(dim=1)).sum(dtype=torch.float64)
    variation = (exact.softmax(dim=1) - approximate.softmax(dim=1)).abs().sum(dtype=torch.float64) / 2
    return torch.stack((difference, square, agreeing, variation))
