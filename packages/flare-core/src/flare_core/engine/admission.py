"""Whether and with what a request may start: validation, the device's share of its prefix, pages, a slot, a fetch."""

from __future__ import annotations

import enum

import numpy as np

from flare_core.engine.config import SchedulerConfig
from flare_core.engine.device_cache import DeviceCache, DeviceMatch
from flare_core.engine.plan_builder import PlanBuilder
from flare_core.engine.request import EngineRequest
from flare_core.engine.sequence import Sequence, SequenceState, TokenBuffer
from flare_core.engine.transfers import Transfers
from flare_core.errors import RequestError
from flare_core.keys import root_key

__all__ = ["Admission", "Verdict", "make_sequence"]


class Verdict(enum.Enum):
    """ADMITTED: it has pages and a slot. BLOCKED: not now. HOPELESS: nothing else runs, and still it does not fit."""

    ADMITTED = "admitted"
    BLOCKED = "blocked"
    HOPELESS = "hopeless"


def make_sequence(request: EngineRequest, *, order: int, config: SchedulerConfig) -> Sequence:
    """The state of a request that can be served.

    Raises:
        RequestError: it cannot be, whatever else runs.
    """
    if not request.token_ids or len(request.token_ids) % 4:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    token_ids = np.frombuffer(request.token_ids, dtype="<u4")
    limit = config.max_sequence_tokens
    if len(token_ids) >= limit:
        msg = f"the prompt has {len(token_ids)} tokens, but at most {limit - 1} fit beside one output token"
        raise RequestError(msg, param="prompt", code="context_length_exceeded")
    if int(token_ids.max()) >= config.vocab_size:
        msg = f"token id {int(token_ids.max())} is outside the vocabulary of {config.vocab_size}"
        raise RequestError(msg, param="prompt")
    if request.params.max_tokens < 1:
        msg = f"max_tokens is {request.params.max_tokens}; at least 1 is needed"
        raise RequestError(msg, param="max_tokens")
    return Sequence(
        request=request,
        order=order,
        root=root_key(config.set_fingerprint, request.salt),
        page_tokens=config.page_tokens,
        tokens=TokenBuffer(token_ids),
        num_prompt_tokens=len(token_ids),
        stop_ids=frozenset(request.params.stop_token_ids),
        max_tokens=min(request.params.max_tokens, limit - len(token_ids)),
    )


class Admission:
    """Gives waiting sequences what they need; remembers when a retry would be in vain."""

    def __init__(self, cache: DeviceCache, transfers: Transfers) -> None:
        self._cache = cache
        self._transfers = transfers
        self._blocked: tuple[Sequence, int, int] | None = None

    def prepare(self, sequence: Sequence) -> None:
        """Have the store find out what it must about what the device lacks; see ``Sequence.lookup``."""
        match = self._match(sequence, allow_copy=False)
        self._transfers.prepare(sequence, num_device_pages=len(match.pages))

    def try_admit(self, sequence: Sequence, builder: PlanBuilder, *, num_active: int, now: float) -> Verdict:
        """Give ``sequence`` a slot, the device's share of its prefix and pages for all it knows, or nothing.

        One page for each active sequence is left alone, so that admitting does not lead to preempting at once.
        """
        if not self._cache.rows.num_free_sequences or sequence.num_in_flight or self._in_vain(sequence, num_active):
            return Verdict.BLOCKED
        available = self._cache.num_available
        match = self._take_pages(sequence, reserve=num_active)
        if match is None:
            self._blocked = (sequence, available, num_active)
            will_change = num_active or self._cache.pool.num_pinned_only or not builder.is_empty
            return Verdict.BLOCKED if will_change else Verdict.HOPELESS
        self._blocked = None
        sequence.slot = self._cache.rows.take_sequence()
        sequence.prefill_end = len(sequence.tokens) - 1
        sequence.state = SequenceState.RUNNING
        sequence.num_admissions += 1
        sequence.num_sent_pages = 0
        sequence.num_computed = match.num_tokens
        sequence.num_registered = len(match.pages)
        sequence.num_handed = match.num_handed
        sequence.copy_source, sequence.num_copied = match.source, match.num_copied
        sequence.row_source = match.row_slot if self._cache.has_rows else None
        sequence.start_needed = True
        if sequence.reads_cache:
            self._transfers.begin_fetch(sequence, after_step=builder.step - 1, now=now)
        return Verdict.ADMITTED

    def _in_vain(self, sequence: Sequence, num_active: int) -> bool:
        if self._blocked is None or self._blocked[0] is not sequence or not num_active:
            return False
        return self._cache.num_available <= self._blocked[1] and num_active >= self._blocked[2]

    def _take_pages(self, sequence: Sequence, *, reserve: int) -> DeviceMatch | None:
        """Hold the match and allocate the rest into ``sequence.pages``; None, and nothing held, when it does not fit.

        A page that would only be copied from is given up before the whole admission is.
        """
        num_pages = sequence.num_pages_for(len(sequence.tokens))
        for allow_copy in (True, False):
            match = self._match(sequence, allow_copy=allow_copy)
            self._cache.acquire(match)
            num_new = num_pages - len(match.pages)
            pages = self._cache.allocate(num_new) if num_new + reserve <= self._cache.num_available else None
            if pages is not None:
                sequence.pages = [*match.pages, *pages]
                return match
            self._cache.drop(match)
            if match.source < 0:
                return None
        return None

    def _match(self, sequence: Sequence, *, allow_copy: bool) -> DeviceMatch:
        num_tokens = len(sequence.tokens) - 1
        if not num_tokens or not sequence.reads_cache:
            return DeviceMatch()
        sequence.extend_keys(num_tokens)
        data = sequence.tokens.bytes(0, num_tokens)
        keys = sequence.keys[: num_tokens // sequence.page_tokens]
        return self._cache.match(sequence.root, keys, data, allow_copy=allow_copy)
