"""Verification coupled to sampling: the text is what sampling without drafts emits, whatever was drafted.

Every row's token is chosen by the noise of ordinary sampling (the stream, seed and position of
:func:`flare_core.compute.sampler.choose_tokens`) and a draft is kept where it is that token. Greedy rows are the case
without noise. Theory: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding", arXiv 2408.07978. Nothing of the size of the vocabulary is exchanged.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from flare_core.compute.collectives import TensorCollectives
from flare_core.compute.philox import gumbel
from flare_core.sharding import Span
from flare_spec.verification.filters import MAX_CANDIDATES, keep_filtered_shards_
from flare_spec.verification.noise import best_of, exchange_best, lowest_best, noisy_scores
from flare_spec.verification.rows import DraftBatch, RowTable, Verified, accept_matching, row_table
from flare_spec.verification.shard import Shard, open_shard
from flare_spec.verification.wire import gather_fields

__all__ = ["choose_on_shards", "verify_coupled"]


def verify_coupled(
    local_logits: torch.Tensor,
    batch: DraftBatch,
    collectives: TensorCollectives,
    *,
    span: Span,
    vocab_size: int,
    max_candidates: int = MAX_CANDIDATES,
) -> Verified:
    """Keep the drafts that ordinary sampling would have emitted, and the next token that it would emit.

    ``local_logits``: float32 [rows of the batch, len(span)], changed in place; the spans of all ranks follow each
    other and make up the vocabulary. One collective where rows are greedy or have a temperature alone; up to two more
    with filters (see :mod:`flare_spec.verification.filters`), or where a row is too close to call.

    Raises:
        ValueError: shapes do not fit.
    """
    table = row_table(batch, vocab_size)
    shard = open_shard(local_logits, batch, table, span, vocab_size)
    tokens = choose_on_shards(shard, table, collectives, max_candidates=max_candidates)
    num_accepted = accept_matching(table, tokens == table.drafted)
    return Verified(num_accepted, tokens[table.on_device(table.first) + num_accepted])


def choose_on_shards(
    shard: Shard, table: RowTable, collectives: TensorCollectives, *, max_candidates: int = MAX_CANDIDATES
) -> torch.Tensor:
    """The token of each row, int64 [rows], equal on every rank: what sampling from the gathered rows gives."""
    tops, values, ids, runners_up = gather_fields(collectives, _local_choices(shard, table))
    top = tops.max(dim=0).values.clamp_(min=torch.finfo(torch.float32).min)
    simple = np.flatnonzero(~table.is_greedy & ~table.is_filtered)
    scores = values.clone()
    certain = np.ones(table.num_rows, dtype=np.bool_)
    if len(simple):
        rows = table.on_device(simple)
        temperatures, best = table.temperatures[rows], top[rows]
        # The same operations on the same bits as in the sampler, for one id of each rank.
        noise = gumbel(table.seeds[rows], table.positions[rows], ids[:, rows].to(torch.int64))
        scores[:, rows] = ((values[:, rows] - best) / temperatures) + noise
        bounds = _bounds(tops[:, rows], best, temperatures, runners_up[:, rows], scores[:, rows])
        certain[simple] = (scores[:, rows].max(dim=0).values > bounds).cpu().numpy()
    tokens = lowest_best(scores, ids)[1]
    rest = np.flatnonzero(table.is_filtered | ~certain)
    if len(rest):
        rows = table.on_device(rest)
        scaled = (shard.logits[rows] - top[rows].unsqueeze(1)).div_(table.temperatures[rows].unsqueeze(1))
        keep_filtered_shards_(
            scaled, table.filters.of(rest), collectives, start=shard.start, max_candidates=max_candidates
        )
        noisy = noisy_scores(scaled, table.seeds[rows], table.positions[rows], start=shard.start)
        tokens[rows] = exchange_best(collectives, noisy, shard.start)
    return tokens


def _local_choices(shard: Shard, table: RowTable) -> list[torch.Tensor]:
    """Of each row: the greatest logit; the logit and the id of the rank's choice; the score of its second choice.

    The choice is the greatest logit itself, or the winner with noise where a row has a temperature alone: scores are
    relative to the rank's own greatest logit, because that of all ranks is not known yet.
    """
    tops, ids = best_of(shard.logits, shard.start)
    values, runners_up = tops, torch.full_like(tops, -math.inf)
    simple = np.flatnonzero(~table.is_greedy & ~table.is_filtered)
    if len(simple):
        rows = table.on_device(simple)
        floor = tops[rows].clamp(min=torch.finfo(tops.dtype).min)
        scaled = (shard.logits[rows] - floor.unsqueeze(1)).div_(table.temperatures[rows].unsqueeze(1))
        scores = noisy_scores(scaled, table.seeds[rows], table.positions[rows], start=shard.start)
        chosen = scores.max(dim=-1).indices
        values, ids = values.clone(), ids.clone()
        values[rows] = shard.logits[rows, chosen]
        ids[rows] = (chosen + shard.start).to(torch.int32)
        runners_up[rows] = scores.scatter_(1, chosen.unsqueeze(1), -math.inf).max(dim=-1).values
    return [tops, values, ids, runners_up]


def _bounds(
    tops: torch.Tensor,
    top: torch.Tensor,
    temperatures: torch.Tensor,
    runners_up: torch.Tensor,
    scores: torch.Tensor,
) -> torch.Tensor:
    """A score that no id reaches which was not sent, float64 [R], from fields [world size, R] and rows [R].

    A rank's second choice, moved from the rank's greatest logit to that of all; and room for the roundings on both
    ways to a score. An id that competes with the best score S lies at most |S| + 23 below the greatest logit, so each
    of at most six roundings is below (|S| + 23) * 2**-24. Ids without noise lie 0.1 below a first choice, and lose.
    """
    shift = (tops.to(torch.float64) - top.to(torch.float64)) / temperatures.to(torch.float64)
    best = scores.max(dim=0).values.to(torch.float64)
    return (runners_up.to(torch.float64) + shift).max(dim=0).values + 1e-6 * (best.abs() + 23.0)
