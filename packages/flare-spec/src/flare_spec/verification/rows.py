"""The drafts to verify, and the table of logit rows that they need. Knows parameters and positions; no logits.

A sequence with n drafts has n + 1 rows: row i decides the token behind its first i drafts. Rows of one sequence lie
together, sequences in the order of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flare_core.compute.sampling_state import SampleRow
from flare_core.sampling import SamplingParams

__all__ = ["NO_DRAFT", "DraftBatch", "FilterTable", "RowTable", "Verified", "accept_matching", "row_table"]

NO_DRAFT = -1
"""Stands for the drafted token of a row behind the last draft; no id equals it."""

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What was drafted, equal on every rank.

    Attributes:
        rows: one a sequence: its sampling state, and the absolute index of the first token to decide.
        num_drafts: drafts of each sequence, 0 or more.
        drafts: int64 [sequences, at least the greatest of num_drafts], on the device of the logits; what lies behind
            a sequence's drafts is ignored.
    """

    rows: Sequence[SampleRow]
    num_drafts: Sequence[int]
    drafts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Verified:
    """What was decided, equal on every rank; int64 [sequences] on the device of the logits.

    Attributes:
        num_accepted: leading drafts that are kept.
        next_token: the token behind them: a correction, or the bonus token where all are kept.
    """

    num_accepted: torch.Tensor
    next_token: torch.Tensor


@dataclass(frozen=True, slots=True)
class FilterTable:
    """Filters of rows, on the host: log of min_p (-inf is off), top_k (0 is off), top_p (1 is off); each [rows]."""

    log_min_p: npt.NDArray[np.float32]
    top_k: _Ints
    top_p: npt.NDArray[np.float64]

    def of(self, rows: _Ints) -> FilterTable:
        """The filters of these rows."""
        return FilterTable(self.log_min_p[rows], self.top_k[rows], self.top_p[rows])


@dataclass(frozen=True, slots=True)
class RowTable:
    """One entry a row; numpy arrays on the host, tensors on the device.

    Attributes:
        sequence, step: whose row, and how many of its drafts lie before it; int64.
        first: the first row of each sequence, int64 [sequences]. num_drafts: int64 [sequences].
        is_greedy, is_filtered: temperature 0; min-p, top-k or top-p with a temperature above 0; bool.
        filters: of all rows.
        seeds, positions: int64. temperatures: float32, 1 where greedy.
        drafted: int64, the draft that the row judges, or :data:`NO_DRAFT`.
    """

    sequence: _Ints
    step: _Ints
    first: _Ints
    num_drafts: _Ints
    is_greedy: _Bools
    is_filtered: _Bools
    filters: FilterTable
    seeds: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    drafted: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows of the whole batch."""
        return len(self.sequence)

    def on_device(self, rows: _Ints) -> torch.Tensor:
        """Row numbers as an int64 tensor beside the others."""
        return torch.from_numpy(rows).to(self.seeds.device)


def row_table(batch: DraftBatch, vocab_size: int) -> RowTable:
    """The rows of ``batch``; no synchronisation with the device.

    Raises:
        ValueError: the batch's parts do not fit each other.
    """
    num_drafts = np.asarray(batch.num_drafts, dtype=np.int64)
    width = batch.drafts.shape[1] if batch.drafts.ndim == 2 else -1
    if len(num_drafts) != len(batch.rows) or batch.drafts.shape[0] != len(num_drafts):
        raise ValueError(
            f"{len(batch.rows)} sequences come with {len(num_drafts)} draft counts and drafts of shape "
            f"{tuple(batch.drafts.shape)}; give one of each a sequence"
        )
    if len(num_drafts) and not 0 <= num_drafts.min() <= num_drafts.max() <= width:
        raise ValueError(f"draft counts {num_drafts.tolist()} do not fit drafts of shape {tuple(batch.drafts.shape)}")
    params = [row.state.params for row in batch.rows]
    sequence = np.repeat(np.arange(len(params)), num_drafts + 1)
    first = np.cumsum(num_drafts + 1) - (num_drafts + 1)
    step = np.arange(len(sequence)) - first[sequence]

    def each(read: Callable[[SamplingParams], float], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.fromiter((read(item) for item in params), dtype=dtype, count=len(params))[sequence]

    temperatures = each(lambda item: item.temperature, np.float64)
    is_greedy = temperatures == 0.0
    top_k = each(lambda item: item.top_k if 0 < item.top_k < vocab_size else 0, np.int64)
    top_p = each(lambda item: item.top_p, np.float64)
    log_min_p = each(lambda item: math.log(item.min_p) if item.min_p > 0.0 else -math.inf, np.float64)
    is_filtered = ~is_greedy & ((top_k > 0) | (top_p < 1.0) | (log_min_p > -math.inf))
    device = batch.drafts.device
    positions = np.fromiter((row.position for row in batch.rows), dtype=np.int64, count=len(params))[sequence] + step
    return RowTable(
        sequence=sequence,
        step=step,
        first=first,
        num_drafts=num_drafts,
        is_greedy=is_greedy,
        is_filtered=is_filtered,
        filters=FilterTable(log_min_p.astype(np.float32), top_k, top_p),
        seeds=torch.from_numpy(each(lambda item: item.seed, np.uint64).view(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        temperatures=torch.from_numpy(np.where(is_greedy, 1.0, temperatures).astype(np.float32)).to(device),
        drafted=_drafted(batch.drafts, num_drafts, sequence, step),
    )


def accept_matching(table: RowTable, is_accepted: torch.Tensor) -> torch.Tensor:
    """Leading accepted rows of each sequence, int64 [sequences]; ``is_accepted`` bool [rows], false without a draft."""
    width = int(table.num_drafts.max(initial=0)) + 1
    grid = torch.zeros((len(table.first), width), dtype=torch.int64, device=is_accepted.device)
    grid[table.on_device(table.sequence), table.on_device(table.step)] = is_accepted.to(torch.int64)
    return grid.cumprod(dim=1).sum(dim=1)


def _drafted(drafts: torch.Tensor, num_drafts: _Ints, sequence: _Ints, step: _Ints) -> torch.Tensor:
    drafted = torch.full((len(sequence),), NO_DRAFT, dtype=torch.int64, device=drafts.device)
    rows = np.flatnonzero(step < num_drafts[sequence])
    where = [torch.from_numpy(item).to(drafts.device) for item in (rows, sequence[rows], step[rows])]
    drafted[where[0]] = drafts[where[1], where[2]]
    return drafted
