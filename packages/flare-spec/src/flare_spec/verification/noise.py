"""Gumbel-max over a rank's own ids and between ranks: noise depends on seed, position, id and stream alone."""

from __future__ import annotations

import math

import torch

from flare_core.compute.collectives import TensorCollectives
from flare_core.compute.philox import STREAM_SAMPLE, gumbel, gumbel_span
from flare_spec.verification.wire import gather_fields

__all__ = ["best_of", "exchange_best", "lowest_best", "noisy_scores"]

_MAX_GUMBEL = 23.0
"""Above any noise: u is at least 2**-33, so G is at most 22.88."""

_DENSE_SHARE = 0.25
"""With a larger share of ids in contention, noise for all of them costs less: Philox makes four ids at a time."""


def noisy_scores(
    scaled: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    start: int,
    stream: int | torch.Tensor = STREAM_SAMPLE,
) -> torch.Tensor:
    """``scaled`` [R, n], float32, of ids from ``start`` on, plus noise; -inf where the greatest noise would not help.

    What is left out lies more than 0.1 below the greatest score of the row. ``seeds``, ``positions`` and, if it is a
    tensor, ``stream``: int64 [R].
    """
    best, columns = scaled.max(dim=-1)
    floor = best + gumbel(seeds, positions, columns + start, stream=stream) - _MAX_GUMBEL
    contending = (scaled >= floor.unsqueeze(1)) & (scaled > -math.inf)
    where = contending.nonzero()
    if len(where) > _DENSE_SHARE * scaled.numel():
        noise = gumbel_span(seeds, positions, start=start, stop=start + scaled.shape[1], stream=stream)
        return torch.where(contending, scaled + noise, -math.inf)
    rows, columns = where[:, 0], where[:, 1]
    streams = stream[rows] if isinstance(stream, torch.Tensor) else stream
    noise = gumbel(seeds[rows], positions[rows], columns + start, stream=streams)
    scores = torch.full_like(scaled, -math.inf)
    scores[rows, columns] = scaled[rows, columns] + noise
    return scores


def best_of(scores: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greatest score of each row [R] and its lowest id, int32 [R]; torch reports the first of equals."""
    values, columns = scores.max(dim=-1)
    return values, (columns + start).to(torch.int32)


def lowest_best(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over ranks: the greatest of ``values`` [world size, R], and of the ids that have it the lowest, int64 [R]."""
    best = values.max(dim=0).values
    tied = torch.where(values == best, ids, torch.iinfo(torch.int32).max)
    return best, tied.min(dim=0).values.to(torch.int64)


def exchange_best(collectives: TensorCollectives, scores: torch.Tensor, start: int) -> torch.Tensor:
    """The id with the greatest score of all ranks, int64 [R]: one (value, id) pair a row and rank, one collective."""
    values, ids = gather_fields(collectives, best_of(scores, start))
    return lowest_best(values, ids)[1]
