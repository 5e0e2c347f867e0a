"""min-p, top-k and top-p over a vocabulary divided between ranks, without gathering it.

Gives every rank the columns that :func:`flare_core.compute.filters.keep_filtered_` would leave of its ids. First each
rank sends its greatest ids and its probability mass, O(1) numbers a row. If the cut lies among ids that all ranks
have sent (the certificate: it is not below the last id sent by any rank), it is exact. Else it is found digit by
digit from histograms, O(1) numbers a row too. Masses are integers, so that sums do not depend on the division.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_core.compute.collectives import TensorCollectives
from flare_core.compute.filters import fixed_point_mass, nucleus_reached
from flare_spec.verification.keys import KEY_BITS, lowest_key, order_keys, values_of
from flare_spec.verification.rows import FilterTable
from flare_spec.verification.wire import gather_fields

__all__ = ["MAX_CANDIDATES", "keep_filtered_shards_"]

MAX_CANDIDATES = 64
"""Ids that each rank sends a row at most, 8 bytes each."""

_DIGIT_BITS = 9
_NUM_BINS = 1 << _DIGIT_BITS


def keep_filtered_shards_(
    scaled: torch.Tensor,
    filters: FilterTable,
    collectives: TensorCollectives,
    *,
    start: int,
    max_candidates: int = MAX_CANDIDATES,
) -> None:
    """Cut ids become minus infinity in ``scaled`` [R, n], float32, in place.

    ``scaled`` holds the ids from ``start`` on, relative to the greatest logit of the whole row, divided by a positive
    temperature. One collective for all rows with top-k or top-p; six to twelve more if the certificate fails for one.
    """
    if np.isfinite(filters.log_min_p).any():
        floor = torch.from_numpy(filters.log_min_p).to(scaled.device)
        scaled.masked_fill_(scaled < floor.unsqueeze(1), -math.inf)
    chosen = np.flatnonzero((filters.top_k > 0) | (filters.top_p < 1.0))
    if not len(chosen):
        return
    rows = torch.from_numpy(chosen).to(scaled.device)
    part, limits = scaled[rows], filters.of(chosen)
    keys = order_keys(part, start)
    cuts, is_certain = _cuts_by_candidates(part, keys, limits, collectives, max_candidates)
    failed = np.flatnonzero(~is_certain.cpu().numpy())
    if len(failed):
        where = torch.from_numpy(failed).to(scaled.device)
        cuts[where] = _cuts_by_histogram(part[where], keys[where], limits.of(failed), collectives)
    scaled[rows] = part.masked_fill_(keys < cuts.unsqueeze(1), -math.inf)


def _cuts_by_candidates(
    part: torch.Tensor, keys: torch.Tensor, limits: FilterTable, collectives: TensorCollectives, max_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest key kept of each row, int64 [R], and whether it is certain, bool [R]."""
    has_top_k, has_top_p = limits.top_k > 0, limits.top_p < 1.0
    width = max_candidates if not has_top_k.all() else min(max_candidates, int(limits.top_k.max()))
    lowest = lowest_key(keys.device)
    own = min(width, keys.shape[1])
    sent = F.pad(torch.topk(keys, own, dim=-1).values, (0, width - own), value=lowest)
    mass, gathered = gather_fields(collectives, [fixed_point_mass(part).sum(dim=-1), sent])
    # A rank that has sent all its ids pads with the lowest key, which is below every cut.
    last_sent = gathered[:, :, -1].max(dim=0).values
    merged = gathered.transpose(0, 1).flatten(1).sort(dim=-1, descending=True).values
    weights, total = fixed_point_mass(values_of(merged)), mass.sum(dim=0)
    sizes = torch.full_like(total, merged.shape[1])
    reaches = torch.ones_like(total, dtype=torch.bool)
    if has_top_k.any():
        top_k = torch.from_numpy(np.where(has_top_k, limits.top_k, merged.shape[1])).to(keys.device)
        is_top_k = torch.from_numpy(has_top_k).to(keys.device)
        weights = weights * (torch.arange(merged.shape[1], device=keys.device) < top_k.unsqueeze(1))
        total = torch.where(is_top_k, weights.sum(dim=-1), total)
        sizes = top_k.clamp(max=merged.shape[1])
        reaches = top_k <= merged.shape[1]
        # What top-p makes of the k best is certain only if these are.
        reaches &= ~is_top_k | (merged.gather(1, (sizes - 1).unsqueeze(1)).squeeze(1) >= last_sent)
    if has_top_p.any():
        top_p = torch.from_numpy(limits.top_p.astype(np.float32)).to(keys.device)
        is_reached = nucleus_reached(weights.cumsum(dim=-1), total.unsqueeze(1), top_p.unsqueeze(1))
        is_top_p = torch.from_numpy(has_top_p).to(keys.device)
        nucleus = ((~is_reached).sum(dim=-1) + 1).clamp_(max=merged.shape[1])
        sizes = torch.where(is_top_p, torch.minimum(nucleus, sizes), sizes)
        reaches &= ~is_top_p | is_reached.any(dim=-1)
    cuts = merged.gather(1, (sizes - 1).unsqueeze(1)).squeeze(1)
    return cuts, reaches & (cuts >= last_sent)


def _cuts_by_histogram(
    part: torch.Tensor, keys: torch.Tensor, limits: FilterTable, collectives: TensorCollectives
) -> torch.Tensor:
    """The lowest key kept of each row, int64 [R], whatever the distribution."""
    cuts = torch.full((len(part),), lowest_key(keys.device), dtype=torch.int64, device=keys.device)
    by_count, by_mass = np.flatnonzero(limits.top_k > 0), np.flatnonzero(limits.top_p < 1.0)
    if len(by_count):
        rows = torch.from_numpy(by_count).to(keys.device)
        top_k = torch.from_numpy(limits.top_k[by_count]).to(keys.device)
        cuts[rows] = _radix_cut(keys[rows], torch.ones_like(keys[rows]), collectives, num_kept=top_k)
    if len(by_mass):
        rows = torch.from_numpy(by_mass).to(keys.device)
        top_p = torch.from_numpy(limits.top_p[by_mass].astype(np.float32)).to(keys.device)
        weights = fixed_point_mass(part[rows]).mul_(keys[rows] >= cuts[rows].unsqueeze(1))
        cuts[rows] = torch.maximum(cuts[rows], _radix_cut(keys[rows], weights, collectives, top_p=top_p))
    return cuts


def _radix_cut(
    keys: torch.Tensor,
    weights: torch.Tensor,
    collectives: TensorCollectives,
    *,
    num_kept: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first key, from the greatest down, at which the weights reach ``num_kept`` or ``top_p`` of them all.

    int64 [R]. Six collectives of 512 sums a row: the digits of the key from the highest, each the first whose bin
    reaches the goal.
    """
    prefix = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
    above = torch.zeros_like(prefix)
    total = prefix
    for shift in range(KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        is_open = (keys >> (shift + _DIGIT_BITS)) == prefix.unsqueeze(1)
        bins = (_NUM_BINS - 1) - ((keys >> shift) & (_NUM_BINS - 1))
        sums = torch.zeros((len(keys), _NUM_BINS), dtype=torch.int64, device=keys.device)
        sums.scatter_add_(1, bins, weights * is_open)
        collectives.all_reduce_(sums)
        through = sums.cumsum(dim=-1) + above.unsqueeze(1)
        if shift == KEY_BITS - _DIGIT_BITS:
            total = through[:, -1]
        if num_kept is not None:
            is_reached = through >= num_kept.unsqueeze(1)
        elif top_p is not None:
            is_reached = nucleus_reached(through, total.unsqueeze(1), top_p.unsqueeze(1))
        else:
            raise AssertionError("a cut needs a goal")
        digit = is_reached.to(torch.int8).argmax(dim=-1, keepdim=True)
        above = through.gather(1, digit).squeeze(1) - sums.gather(1, digit).squeeze(1)
        prefix = (prefix << _DIGIT_BITS) | ((_NUM_BINS - 1) - digit.squeeze(1))
    return prefix
