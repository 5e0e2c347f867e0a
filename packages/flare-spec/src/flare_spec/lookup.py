"""Prompt lookup: a sequence goes on as it did the last time its latest tokens occurred (Saxena 2023; vLLM's ``ngram``).

The longest run of latest tokens that occurred before decides, the last occurrence of it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flare_core.keys import TokenIds
from flare_spec.matches import TokenText, longest_matches

__all__ = ["LookupDrafter"]


@dataclass(slots=True)
class LookupDrafter:
    """A :class:`flare_core.ports.Drafter`.

    Attributes:
        longest, shortest: tokens that are compared at most, and that must be equal at least.
    """

    longest: int
    shortest: int
    _texts: dict[int, TokenText] = field(default_factory=dict)

    def start(self, slot: int, token_ids: TokenIds) -> None:
        """See the port."""
        self._texts[slot] = TokenText(token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """See the port."""
        self._texts[slot].extend(token_ids)

    def propose(self, slot: int, max_tokens: int) -> Sequence[int]:
        """See the port. One pass over the text."""
        ids = self._texts[slot].ids
        # The text's own end is no occurrence: nothing follows it.
        length, ends = longest_matches(ids[:-1], ids[-self.longest :])
        if length < self.shortest:
            return ()
        tokens: list[int] = ids[ends[-1] : ends[-1] + max_tokens].tolist()
        return tokens
