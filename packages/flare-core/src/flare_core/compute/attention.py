"""The interface between a model and paged attention: a plan is made once a step and asked once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["AttentionPlan", "BatchRow", "ChunkGroup", "PagedAttention"]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row of a decode batch: the sequence's pages in order and the position of the row's token.

    Rows of one sequence have the same ``pages`` and stand together, by position.
    """

    pages: Sequence[int]
    position: int


class AttentionPlan(Protocol):
    """Attention of one pass through the layers. Used by one thread; plans of one backend are not used by turns.

    Chunks of one step are made together and used layer by layer, one after the other.
    """

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Write the tokens' keys and values, ``key_value`` [M, 2, KV heads, D], rotated, to their pages."""
        ...

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Write as :meth:`write`, then attend with ``query`` [M, query heads, D]; gives [M, query heads * D]."""
        ...


class ChunkGroup:
    """Chunks of several sequences as one plan: their rows stand one behind the other, each attends on its own."""

    def __init__(self, plans: Sequence[AttentionPlan], sizes: Sequence[int]) -> None:
        self._plans = plans
        self._sizes = list(sizes)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """As :meth:`AttentionPlan.write`."""
        for plan, part in zip(self._plans, torch.split(key_value, self._sizes), strict=True):
            plan.write(layer, part)

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """As :meth:`AttentionPlan.attend`."""
        parts = zip(torch.split(query, self._sizes), torch.split(key_value, self._sizes), strict=True)
        return torch.cat([plan.attend(layer, *part) for plan, part in zip(self._plans, parts, strict=True)])


class PagedAttention(Protocol):
    """Attention over the pages of one pool."""

    def chunk(self, pages: Sequence[int], start: int, num_tokens: int) -> AttentionPlan:
        """Tokens [start, start + num_tokens) of one sequence: all earlier tokens, and causally each other."""
        ...

    def batch(self, rows: Sequence[BatchRow]) -> AttentionPlan:
        """Rows of one token each, against their sequence's tokens up to themselves, those of earlier rows included."""
        ...
