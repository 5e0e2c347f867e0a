"""min-p, top-k and top-p over rows of scaled logits. What is cut becomes minus infinity; ties are kept by lowest id."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flare_core.sampling import SamplingParams

__all__ = ["fixed_point_mass", "keep_filtered_", "nucleus_reached"]

_FIRST_SORT = 1024
"""Values that are sorted first for top-p; a nucleus seldom needs more, and then all are sorted."""

_MASS_ONE = 2.0**40
"""The mass of the best id. A vocabulary of 2**22 ids sums to less than 2**63."""


def keep_filtered_(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Apply each row's filters in the order min-p, top-k, top-p to ``scaled`` [R, vocabulary], in place."""
    _keep_min_p_(scaled, params)
    vocab_size = scaled.shape[1]
    top_k = [item.top_k if 0 < item.top_k < vocab_size else vocab_size for item in params]
    if min(top_k) < vocab_size:
        rows = [index for index, k in enumerate(top_k) if k < vocab_size]
        _keep_largest_(scaled, rows, torch.tensor([top_k[index] for index in rows], device=scaled.device))
    rows = [index for index, item in enumerate(params) if item.top_p < 1.0]
    if rows:
        top_p = torch.tensor([params[index].top_p for index in rows], dtype=torch.float32, device=scaled.device)
        _keep_largest_(scaled, rows, _nucleus_sizes(scaled[rows], top_p))


def _keep_min_p_(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep ids whose probability is at least ``min_p`` times the greatest."""
    if all(item.min_p <= 0.0 for item in params):
        return
    margins = [math.log(item.min_p) if item.min_p > 0.0 else -math.inf for item in params]
    floor = scaled.max(dim=-1, keepdim=True).values + torch.tensor(margins, device=scaled.device).unsqueeze(1)
    scaled.masked_fill_(scaled < floor, -math.inf)


def fixed_point_mass(scaled: torch.Tensor) -> torch.Tensor:
    """exp(``scaled``) in units of 2**-40, int64, of float32 values that are at most zero.

    Integers add up to the same sum in any order and grouping, so that a nucleus is the same however the vocabulary is
    divided over ranks. A float32 of at least 2**-16 is exact in these units; what is cut off less likely ones is not
    worth an id.
    """
    return (scaled.exp() * _MASS_ONE).to(torch.int64)


def nucleus_reached(mass: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Whether cumulative ``mass`` is at least ``top_p`` (float32) of ``total``, both int64; shapes broadcast."""
    return mass.to(torch.float64) >= top_p.to(torch.float64) * total.to(torch.float64)


def _nucleus_sizes(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """How many of the most likely ids it takes to reach ``top_p`` [R], at least one; int64 [R].

    An id belongs to the nucleus while the probability before it is below ``top_p``.
    """
    total = fixed_point_mass(scaled).sum(dim=-1, keepdim=True)
    width = min(_FIRST_SORT, scaled.shape[1])
    while True:
        values = torch.topk(scaled, width, dim=-1).values
        reached = nucleus_reached(fixed_point_mass(values).cumsum(dim=-1), total, top_p.unsqueeze(1))
        if width == scaled.shape[1] or bool(reached.any(dim=-1).all()):
            return ((~reached).sum(dim=-1) + 1).clamp_(max=width)
        width = scaled.shape[1]


def _keep_largest_(scaled: torch.Tensor, rows: Sequence[int], counts: torch.Tensor) -> None:
    """Keep the ``counts`` [len(rows)] greatest values of each named row; of equals the lowest ids."""
    part = scaled[rows]
    ordered = torch.topk(part, int(counts.max()), dim=-1).values
    threshold = ordered.gather(1, (counts - 1).unsqueeze(1))
    above = part > threshold
    equal = part == threshold
    room = (counts - above.sum(dim=-1)).unsqueeze(1)
    kept = above | (equal & (equal.cumsum(dim=-1) <= room))
    scaled[rows] = part.masked_fill_(~kept, -math.inf)
