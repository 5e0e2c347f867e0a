"""One request on its way through the engine: tokens, pages and where it stands. Plain state, no decisions."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from flare_core.engine.request import EngineRequest
from flare_core.engine.speculation import AcceptanceEstimate
from flare_core.keys import TokenIds, chain_keys, next_key
from flare_core.prefix import Tier

__all__ = ["Sequence", "SequenceState", "TokenBuffer"]


class SequenceState(enum.Enum):
    """WAITING for pages and a slot; FETCHING its prefix into pages of its own; RUNNING (prefill, then decode);
    ENDING: it gets no more steps, but some of its steps or its fetch are not over; ENDED: it holds nothing.
    """

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


class TokenBuffer:
    """Token ids that only grow."""

    def __init__(self, token_ids: TokenIds) -> None:
        self._ids = token_ids
        self._length = len(token_ids)

    def __len__(self) -> int:
        return self._length

    def append(self, token: int) -> None:
        """One more; amortised O(1)."""
        if self._length == len(self._ids):
            grown = np.empty(self._length + max(64, self._length // 4), dtype="<u4")
            grown[: self._length] = self._ids
            self._ids = grown
        self._ids[self._length] = token
        self._length += 1

    def view(self, start: int, stop: int) -> TokenIds:
        """Ids [start, stop), without a copy; what is there never changes."""
        return self._ids[start : min(stop, self._length)]

    def bytes(self, start: int, stop: int) -> bytes:
        """The same as u32 LE."""
        return self.view(start, stop).tobytes()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state.

    Attributes:
        order: place in the queue of arrival; lower is served first and preempted last.
        tokens: the prompt, the outputs, and behind an end those of steps that were already under way (dropped).
        keys: chain keys of the first whole pages; grown on demand.
        num_outputs: tokens sent out.
        num_pending: steps that sample for it and have not finished.
        is_verifying: one of them verifies drafts: how far it comes is not known yet.
        acceptance: of its drafts. num_drafted, num_accepted: drafts that were verified, and that were right.
        num_in_flight: planned steps with a part in it that have not finished.
        pages: its page table, of which the runner knows the first ``num_sent_pages``.
        num_computed: positions [0, n) that planned steps compute or that were restored.
        prefill_end: positions before it are computed by PREFILL runs, the one at it by the FIRST run.
        start_needed: the next run is preceded by a ``SequenceStart``.
        num_registered: whole pages that the device index knows.
        num_handed: tokens that the prefix store was offered or gave.
        copy_source, num_copied: a page of the device index whose first tokens are to be copied, or -1.
        row_source: row slot the sequence starts from: a snapshot, -1 for the zero row, None when its own is right.
        lookup: what the prefix store still has to find out before the sequence is admitted.
        ticket: the fetch under way. give_up: it was cancelled to preempt the sequence.
        last_step: last planned step with a run of it.
    """

    request: EngineRequest
    order: int
    root: bytes
    page_tokens: int
    tokens: TokenBuffer
    num_prompt_tokens: int
    stop_ids: frozenset[int]
    max_tokens: int
    state: SequenceState = SequenceState.WAITING
    keys: list[bytes] = field(default_factory=list)
    num_outputs: int = 0
    num_pending: int = 0
    is_verifying: bool = False
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    num_drafted: int = 0
    num_accepted: int = 0
    num_in_flight: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_sent_pages: int = 0
    num_computed: int = 0
    prefill_end: int = 0
    start_needed: bool = True
    num_registered: int = 0
    num_handed: int = 0
    copy_source: int = -1
    num_copied: int = 0
    row_source: int | None = None
    lookup: int | None = None
    ticket: int | None = None
    give_up: bool = False
    last_step: int = 0
    fetch_start: float = 0.0
    num_prompt_logprobs: int = 0
    num_admissions: int = 0
    last_token_at: float = 0.0
    cached_tokens: dict[Tier, int] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def reads_cache(self) -> bool:
        """Prompt log-probabilities must be computed, so such a request restores nothing."""
        return self.request.params.prompt_logprobs is None

    @property
    def may_decode(self) -> bool:
        """Its first token was planned, and one more is wanted unless a token that is not known yet ends it."""
        if self.is_verifying:
            return False
        return self.num_computed > self.prefill_end and self.num_outputs + self.num_pending < self.max_tokens

    @property
    def max_drafts(self) -> int:
        """Drafts that may be verified with the next token; none while a step of its is under way."""
        return 0 if self.num_in_flight else self.max_tokens - self.num_outputs - 1

    def verified(self, num_drafts: int, num_accepted: int, *, num_tokens: int) -> None:
        """A step has verified drafts; ``num_tokens`` of what it decided count."""
        self.is_verifying = False
        self.num_computed += num_tokens
        self.acceptance.verified(num_drafts, num_accepted)
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted

    def extend_keys(self, num_tokens: int) -> None:
        """Have the chain keys of the whole pages of the first ``num_tokens`` known tokens."""
        num_pages = num_tokens // self.page_tokens
        if len(self.keys) >= num_pages:
            return
        start = len(self.keys)
        last = self.keys[-1] if self.keys else self.root
        size = self.page_tokens
        if num_pages - start == 1:
            self.keys.append(next_key(last, self.tokens.view(start * size, start * size + size)))
        else:
            self.keys.extend(chain_keys(last, self.tokens.view(start * size, num_pages * size), size))

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_tokens)
