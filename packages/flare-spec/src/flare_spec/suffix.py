"""Suffix decoding: a sequence goes on as most texts did that said the same before (Oliaro et al., arXiv:2411.04975).

Texts are the sequence itself and the outputs of earlier requests. The paper walks a suffix tree with counts; here the
places of the longest match are the tree's node, found in one pass, and drafting narrows them token by token, which
gives the same counts without a tree to keep. A longer match earns a longer draft, and a draft ends where its chance,
by those counts, falls too low.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flare_core.keys import TokenIds
from flare_core.sampling import SamplingParams
from flare_spec.matches import Places, TokenText, longest_matches

if TYPE_CHECKING:
    import torch

__all__ = ["SuffixDrafter"]

_SEPARATOR = 0xFFFF_FFFF
"""Between remembered outputs; no token has this id."""


@dataclass(slots=True)
class SuffixDrafter:
    """A :class:`flare_core.ports.Drafter`.

    Attributes:
        max_drafts: see the port.
        longest: tokens that are compared at most.
        max_requests: earlier outputs that are remembered.
        drafts_per_match: drafts for each token of a match, at most.
        least_chance: of a draft and all before it together, by what was seen.
    """

    max_drafts: int
    longest: int
    max_requests: int
    drafts_per_match: float
    least_chance: float
    taps: tuple[int, ...] = ()
    _texts: dict[int, TokenText] = field(default_factory=dict)
    _outputs: deque[NDArray[np.uint32]] = field(default_factory=deque)
    _memory: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, dtype=np.uint32))

    def start(self, slot: int, token_ids: TokenIds, params: SamplingParams) -> None:
        """See the port. What the slot's last sequence said is remembered: O(all that is remembered)."""
        del params
        before = self._texts.get(slot)
        if before is not None and self.max_requests and len(before.ids) > before.num_known:
            self._outputs.append(before.ids[before.num_known :].copy())
            if len(self._outputs) > self.max_requests:
                self._outputs.popleft()
            separator = np.array([_SEPARATOR], dtype=np.uint32)
            self._memory = np.concatenate([part for output in self._outputs for part in (output, separator)])
        self._texts[slot] = TokenText(token_ids)

    def observe(self, slot: int, start: int, rows: torch.Tensor) -> None:
        """Nothing is tapped."""

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """See the port."""
        self._texts[slot].extend(token_ids)

    def propose(self, slots: Sequence[int], max_tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """See the port. For each a pass over its text and one over what is remembered."""
        return [self._propose(self._texts[slot].ids, most) for slot, most in zip(slots, max_tokens, strict=True)]

    def _propose(self, ids: NDArray[np.uint32], max_tokens: int) -> list[int]:
        latest = ids[-self.longest :]
        own_length, own_ends = longest_matches(ids[:-1], latest)
        length, ends = longest_matches(self._memory, latest)
        if own_length >= length:
            return self._most_frequent(ids, own_ends, min(max_tokens, int(own_length * self.drafts_per_match)))
        return self._most_frequent(self._memory, ends, min(max_tokens, int(length * self.drafts_per_match)))

    def _most_frequent(self, text: NDArray[np.uint32], ends: Places, max_tokens: int) -> list[int]:
        """What followed most often behind ``ends``; of equals the lowest id."""
        drafts: list[int] = []
        chance = 1.0
        while len(drafts) < max_tokens and len(ends):
            num_places = len(ends)
            ends = ends[ends < len(text)]
            followers = text[ends]
            ids, counts = np.unique(followers[followers != _SEPARATOR], return_counts=True)
            if not len(ids):
                break
            best = int(counts.argmax())
            chance *= counts[best] / num_places
            if chance < self.least_chance:
                break
            drafts.append(int(ids[best]))
            ends = ends[followers == ids[best]] + 1
        return drafts
