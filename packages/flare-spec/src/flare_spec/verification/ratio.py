"""Verification by rejection sampling on vocabulary shards: drafts are kept as often as the target's p allows.

A draft x is kept with probability min(1, p(x)/q(x)); in place of the first rejected one comes a token of the residual
max(p - q, 0), normalised; behind drafts that are all kept, one of p. What is emitted is distributed as p, whatever q.
Sources: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2022); Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023).

On shards: the ranks exchange sums (phase A) and decide acceptance alike; then each proposes the best of its own ids
by Gumbel-max over log(p - q), which needs no normaliser, and one exchange of pairs finds the best of all (phase B).
p is what sampling would draw from, after all filters; q is not filtered. Greedy rows keep a draft that is the greatest
logit. Without drafts a row emits what ordinary sampling emits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from flare_core.compute.collectives import TensorCollectives
from flare_core.compute.philox import STREAM_ACCEPT, STREAM_RESIDUAL, STREAM_SAMPLE, uniform
from flare_core.sharding import Span
from flare_spec.verification.filters import MAX_CANDIDATES, keep_filtered_shards_
from flare_spec.verification.noise import best_of, exchange_best, lowest_best, noisy_scores
from flare_spec.verification.proposals import (
    DraftPlaces,
    Proposal,
    ProposalRows,
    columns_at,
    local_fields,
    local_log_q,
    proposal_rows,
    rebased_total,
    sum_exp,
)
from flare_spec.verification.rows import DraftBatch, RowTable, Verified, accept_matching, row_table
from flare_spec.verification.shard import Shard, open_shard
from flare_spec.verification.wire import gather_fields

__all__ = ["verify_ratio"]


@dataclass(frozen=True, slots=True)
class _Round:
    """One verification on this rank.

    Attributes:
        rows: int64 [n], the judged ones: with a draft, and not greedy. ``places``: of their drafts.
        is_filtered: bool [n], which of them have filters.
    """

    shard: Shard
    table: RowTable
    proposal: Proposal
    collectives: TensorCollectives
    rows: torch.Tensor
    places: DraftPlaces
    is_filtered: torch.Tensor

    def scaled(self, rows: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """Logits of ``rows`` int64 [m] relative to ``top`` [rows of the batch], divided by the temperature."""
        return (self.shard.logits[rows] - top[rows].unsqueeze(1)).div_(self.table.temperatures[rows].unsqueeze(1))


@dataclass(frozen=True, slots=True)
class _Target:
    """p of all rows on this rank, and what phase A decides by; equal on every rank but for ``kept``.

    Attributes:
        top: float32 [rows], the greatest logit of all ranks. greedy: int64 [rows], the lowest id that has it.
        log_total: float64 [rows], of the sum of exponentials; of judged rows alone.
        log_p: float64 [judged rows], of the drafted tokens.
        kept: float32 [filtered rows, own ids], scaled and filtered; None without filtered rows.
        kept_index: int64 [rows], a row's place in ``kept``, or -1.
        drafts: q of the judged drafts.
    """

    top: torch.Tensor
    greedy: torch.Tensor
    log_total: torch.Tensor
    log_p: torch.Tensor
    kept: torch.Tensor | None
    kept_index: torch.Tensor
    drafts: ProposalRows


def verify_ratio(
    local_logits: torch.Tensor,
    batch: DraftBatch,
    proposal: Proposal,
    collectives: TensorCollectives,
    *,
    span: Span,
    vocab_size: int,
    max_candidates: int = MAX_CANDIDATES,
) -> Verified:
    """Keep drafts by rejection sampling, and draw the next token.

    ``local_logits``: float32 [rows of the batch, len(span)], changed in place; the spans of all ranks follow each
    other and make up the vocabulary. Two collectives where rows are greedy or have a temperature alone, one if all are
    greedy; with filters two more (see :mod:`flare_spec.verification.filters`).

    Raises:
        ValueError: shapes do not fit, or a draft has no probability in its own proposal.
    """
    table = row_table(batch, vocab_size)
    shard = open_shard(local_logits, batch, table, span, vocab_size)
    this = _judge(shard, table, proposal, collectives)
    target = _phase_a(this, max_candidates)
    is_accepted = target.greedy == table.drafted
    is_accepted[this.rows] = _accepts(table, this.rows, target.log_p, target.drafts.log_q)
    num_accepted = accept_matching(table, is_accepted)
    deciding = table.on_device(table.first) + num_accepted
    tokens = target.greedy[deciding]
    random = np.flatnonzero(~table.is_greedy[table.first])
    if len(random):
        whose = table.on_device(random)
        tokens[whose] = _phase_b(this, target, deciding[whose])
    return Verified(num_accepted, tokens)


def _judge(shard: Shard, table: RowTable, proposal: Proposal, collectives: TensorCollectives) -> _Round:
    judged = np.flatnonzero(~table.is_greedy & (table.step < table.num_drafts[table.sequence]))
    rows = table.on_device(judged)
    places = DraftPlaces(
        sequence=table.on_device(table.sequence[judged]),
        step=table.on_device(table.step[judged]),
        drafted=table.drafted[rows],
        temperatures=table.temperatures[rows],
    )
    is_filtered = torch.from_numpy(table.is_filtered[judged]).to(rows.device)
    return _Round(shard, table, proposal, collectives, rows, places, is_filtered)


def _phase_a(this: _Round, max_candidates: int) -> _Target:
    """Sums over the vocabulary, in one exchange; in two more for rows with filters, whose sums come after the cut."""
    shard, table, rows = this.shard, this.table, this.rows
    tops, ids = best_of(shard.logits, shard.start)
    own_top = tops.clamp(min=torch.finfo(tops.dtype).min)
    at = columns_at(shard.logits, table.drafted, shard)
    sums = torch.zeros_like(tops, dtype=torch.float64)
    simple = rows[~this.is_filtered]
    sums[simple] = sum_exp(this.scaled(simple, own_top))
    of_drafts = [
        torch.zeros_like(tops, dtype=field.dtype).index_put_((rows,), field)
        for field in local_fields(this.proposal, this.places, shard)
    ]
    tops, ids, at, sums, *of_drafts = gather_fields(this.collectives, [tops, ids, at, sums, *of_drafts])
    best, greedy = lowest_best(tops, ids)
    top = best.clamp(min=torch.finfo(best.dtype).min)
    own_tops = tops.clamp(min=torch.finfo(tops.dtype).min)
    log_total = rebased_total(own_tops, sums, top, table.temperatures).log()
    scaled_at = (at.max(dim=0).values - top) / table.temperatures
    kept, kept_index = _filtered(this, top, max_candidates)
    filtered = rows[this.is_filtered]
    if kept is not None and len(filtered):
        part = kept[kept_index[filtered]]
        at = columns_at(part, table.drafted[filtered], shard)
        at, sums = gather_fields(this.collectives, [at, sum_exp(part)])
        scaled_at[filtered] = at.max(dim=0).values
        log_total[filtered] = sums.sum(dim=0).log()
    return _Target(
        top=top,
        greedy=greedy,
        log_total=log_total,
        log_p=scaled_at[rows].to(torch.float64) - log_total[rows],
        kept=kept,
        kept_index=kept_index,
        drafts=proposal_rows(this.proposal, this.places, [field[:, rows] for field in of_drafts]),
    )


def _filtered(this: _Round, top: torch.Tensor, max_candidates: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Filtered rows, scaled, and each row's place among them or -1."""
    table = this.table
    chosen = np.flatnonzero(table.is_filtered)
    index = torch.full_like(table.positions, -1)
    if not len(chosen):
        return None, index
    rows = table.on_device(chosen)
    index[rows] = torch.arange(len(rows), device=rows.device)
    kept = this.scaled(rows, top)
    keep_filtered_shards_(
        kept, table.filters.of(chosen), this.collectives, start=this.shard.start, max_candidates=max_candidates
    )
    return kept, index


def _accepts(table: RowTable, rows: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Whether each judged draft is kept, bool [n], by itself: u < p / q."""
    drawn = uniform(table.seeds[rows], table.positions[rows], stream=STREAM_ACCEPT)
    return drawn.log() < log_p - log_q


def _phase_b(this: _Round, target: _Target, rows: torch.Tensor) -> torch.Tensor:
    """The next tokens, int64 [n], of the deciding ``rows``: corrections by the residual, bonus tokens by p.

    One exchange of pairs, and a second one, of p, where roundings leave no residual.
    """
    table, start = this.table, this.shard.start
    is_correction = table.drafted[rows] >= 0
    stream = torch.where(is_correction, STREAM_RESIDUAL, STREAM_SAMPLE)
    seeds, positions = table.seeds[rows], table.positions[rows]
    whole = _target_scaled(this, target, rows)
    scores = noisy_scores(_next_weights(this, target, rows, whole), seeds, positions, start=start, stream=stream)
    best, tokens = lowest_best(*gather_fields(this.collectives, best_of(scores, start)))
    empty = ((best == -math.inf) & is_correction).nonzero().squeeze(1)
    if len(empty):
        tokens[empty] = _draw_whole(this, rows[empty], whole[empty])
    return tokens


def _draw_whole(this: _Round, rows: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Tokens of p, int64 [n], where p exceeds q nowhere for roundings: then p and q are equal but for these."""
    table, start = this.table, this.shard.start
    scores = noisy_scores(whole, table.seeds[rows], table.positions[rows], start=start, stream=STREAM_RESIDUAL)
    return exchange_best(this.collectives, scores, start)


def _target_scaled(this: _Round, target: _Target, rows: torch.Tensor) -> torch.Tensor:
    """What p is the softmax of, float32 [n, own ids]."""
    scaled = this.scaled(rows, target.top)
    if target.kept is None:
        return scaled
    index = target.kept_index[rows]
    return torch.where((index >= 0).unsqueeze(1), target.kept[index.clamp(min=0)], scaled)


def _next_weights(this: _Round, target: _Target, rows: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Logits of the next token, float32 [n, own ids]: of the residual behind a rejected draft, else of p."""
    entry = torch.full((this.table.num_rows,), -1, dtype=torch.int64, device=rows.device)
    entry[this.rows] = torch.arange(len(this.rows), device=rows.device)
    rejected = (entry[rows] >= 0).nonzero().squeeze(1)
    if not len(rejected):
        return whole
    which = entry[rows[rejected]]
    log_p = whole[rejected] - target.log_total[rows[rejected]].to(torch.float32).unsqueeze(1)
    log_q = local_log_q(this.proposal, target.drafts.of(which), this.places.of(which), this.shard)
    return whole.index_copy(0, rejected, residual_log_weights(log_p, log_q))


def residual_log_weights(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log(p - q) where p exceeds q, else minus infinity; float32 [n, own ids]."""
    exceeds = log_p > log_q
    ratio = torch.where(exceeds, log_q - log_p, -math.inf).exp()
    return torch.where(exceeds, log_p + torch.log1p(-ratio), -math.inf)
