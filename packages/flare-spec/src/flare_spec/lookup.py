"""Prompt lookup: a sequence goes on as it did the last time its latest tokens occurred (Saxena 2023; vLLM's ``ngram``).

The longest run of latest tokens that occurred before decides, the last occurrence of it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flare_core.keys import TokenIds
from flare_core.sampling import SamplingParams
from flare_spec.matches import TokenText, longest_matches

if TYPE_CHECKING:
    import torch

__all__ = ["LookupDrafter"]


@dataclass(slots=True)
class LookupDrafter:
    """A :class:`flare_core.ports.Drafter`.

    Attributes:
        max_drafts: see the port.
        longest, shortest: tokens that are compared at most, and that must be equal at least.
    """

    max_drafts: int
    longest: int
    shortest: int
    taps: tuple[int, ...] = ()
    _texts: dict[int, TokenText] = field(default_factory=dict)

    def start(self, slot: int, token_ids: TokenIds, params: SamplingParams) -> None:
        """See the port."""
        del params
        self._texts[slot] = TokenText(token_ids)

    def observe(self, slot: int, start: int, rows: torch.Tensor) -> None:
        """Nothing is tapped."""

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """See the port."""
        self._texts[slot].extend(token_ids)

    def propose(self, slots: Sequence[int], max_tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """See the port. One pass over each text."""
        return [self._propose(self._texts[slot], most) for slot, most in zip(slots, max_tokens, strict=True)]

    def _propose(self, text: TokenText, max_tokens: int) -> list[int]:
        ids = text.ids
        # The text's own end is no occurrence: nothing follows it.
        length, ends = longest_matches(ids[:-1], ids[-self.longest :])
        if length < self.shortest:
            return []
        tokens: list[int] = ids[ends[-1] : ends[-1] + max_tokens].tolist()
        return tokens
