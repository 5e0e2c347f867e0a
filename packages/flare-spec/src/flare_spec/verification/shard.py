"""One rank's logits of its own vocabulary ids, ready for decisions: cleaned, biased, penalised.

The arithmetic is that of :mod:`flare_core.compute.sampler`, element by element, so that what a rank holds has the bits
that the same columns of the gathered row would have. Rows are vectorised; biases and forbidden ids go by sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from flare_core.compute.sampler import clean_
from flare_core.compute.sampling_state import SlotSampling
from flare_core.sharding import Span
from flare_spec.verification.rows import DraftBatch, RowTable

__all__ = ["Shard", "open_shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Adjusted logits of a contiguous span of ids.

    A rank without ids has one column of minus infinities under the id ``vocab_size``: it wins nothing, and ties go to
    lower ids.

    Attributes:
        logits: float32 [rows, stop - start].
        start, stop: ids of the columns.
    """

    logits: torch.Tensor
    start: int
    stop: int


def open_shard(local_logits: torch.Tensor, batch: DraftBatch, table: RowTable, span: Span, vocab_size: int) -> Shard:
    """``local_logits`` [rows, len(span)], float32, changed in place.

    Raises:
        ValueError: the logits do not have a row for each entry of the table and a column for each id.
    """
    if tuple(local_logits.shape) != (table.num_rows, len(span)):
        raise ValueError(
            f"logits of shape {tuple(local_logits.shape)} do not fit {table.num_rows} rows of {len(span)} ids"
        )
    if len(span) == 0:
        return Shard(local_logits.new_full((table.num_rows, 1), -math.inf), vocab_size, vocab_size + 1)
    clean_(local_logits)
    _add_biases_(local_logits, batch, table, span)
    _subtract_penalties_(local_logits, batch, table, span)
    _forbid_stops_(local_logits, batch, table, span)
    return Shard(local_logits, span.start, span.stop)


def _add_biases_(logits: torch.Tensor, batch: DraftBatch, table: RowTable, span: Span) -> None:
    for index, row in enumerate(batch.rows):
        if not row.state.params.logit_bias:
            continue
        own = [(token, value) for token, value in row.state.params.logit_bias if span.start <= token < span.stop]
        if own:
            rows = logits[table.first[index] : table.first[index] + table.num_drafts[index] + 1]
            ids = torch.tensor([token - span.start for token, _ in own], device=logits.device)
            values = torch.tensor([value for _, value in own], dtype=logits.dtype, device=logits.device)
            rows.index_add_(1, ids, values.expand(len(rows), -1))


def _subtract_penalties_(logits: torch.Tensor, batch: DraftBatch, table: RowTable, span: Span) -> None:
    """Rows with equal penalties are done together: scalars then have the bits that they have in the sampler."""
    groups: dict[tuple[float, float, float], list[int]] = {}
    for index, row in enumerate(batch.rows):
        if row.state.output_counts is not None:
            params = row.state.params
            key = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            groups.setdefault(key, []).append(index)
    for (repetition, frequency, presence), sequences in groups.items():
        member = np.full(len(batch.rows), -1)
        member[sequences] = np.arange(len(sequences))
        chosen = np.flatnonzero(member[table.sequence] >= 0)
        rows = table.on_device(chosen)
        whose = table.on_device(member[table.sequence[chosen]])
        states = [batch.rows[index].state for index in sequences]
        counts = _stack_counts(states, span)[whose]
        _count_drafts_(counts, batch, table, chosen, span)
        part = logits[rows]
        if repetition != 1.0:
            seen = _stack_prompts(states, span)[whose] | (counts > 0)
            part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        part.sub_(counts * frequency)
        part.sub_((counts > 0) * presence)
        logits[rows] = part


def _stack_counts(states: list[SlotSampling], span: Span) -> torch.Tensor:
    return torch.stack([s.output_counts[span.start : span.stop] for s in states if s.output_counts is not None])


def _stack_prompts(states: list[SlotSampling], span: Span) -> torch.Tensor:
    return torch.stack([s.in_prompt[span.start : span.stop] for s in states if s.in_prompt is not None])


def _count_drafts_(
    counts: torch.Tensor,
    batch: DraftBatch,
    table: RowTable,
    chosen: np.ndarray[tuple[int], np.dtype[np.int64]],
    span: Span,
) -> None:
    """Add to row i's counts the drafts before it, as if they had been put out."""
    steps = table.on_device(table.step[chosen])
    before = batch.drafts[table.on_device(table.sequence[chosen])] - span.start
    counted = torch.arange(before.shape[1], device=counts.device) < steps.unsqueeze(1)
    where = (counted & (before >= 0) & (before < len(span))).nonzero()
    columns = before[where[:, 0], where[:, 1]]
    counts.index_put_((where[:, 0], columns), counts.new_ones(len(columns)), accumulate=True)


def _forbid_stops_(logits: torch.Tensor, batch: DraftBatch, table: RowTable, span: Span) -> None:
    for index, row in enumerate(batch.rows):
        params = row.state.params
        if not row.state.forbids_stops(row.position):
            continue
        num_forbidden = params.min_tokens - (row.position - row.state.num_prompt_tokens)
        first = int(table.first[index])
        last = first + min(num_forbidden, int(table.num_drafts[index]) + 1)
        own = [token - span.start for token in params.stop_token_ids if span.start <= token < span.stop]
        logits[first:last, own] = -math.inf
