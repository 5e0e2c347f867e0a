"""The interface between a model and paged attention: a plan is made once a step and asked once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["AttentionPlan", "BatchRow", "PagedAttention"]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row of a decode batch: the sequence's pages in order and the position of the row's token."""

    pages: Sequence[int]
    position: int


class AttentionPlan(Protocol):
    """One step's attention. Used by one thread; valid until the next plan of the same backend is made."""

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Write the tokens' keys and values to their pages, then attend.

        ``query`` [M, query heads, D] and ``key_value`` [M, 2, KV heads, D], rotated; gives [M, query heads * D].
        """
        ...


class PagedAttention(Protocol):
    """Attention over the pages of one pool."""

    def chunk(self, pages: Sequence[int], start: int, num_tokens: int) -> AttentionPlan:
        """Tokens [start, start + num_tokens) of one sequence: all earlier tokens, and causally each other."""
        ...

    def batch(self, rows: Sequence[BatchRow]) -> AttentionPlan:
        """One token of each of several sequences, each against its own tokens up to itself."""
        ...
