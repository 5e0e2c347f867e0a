"""Which prompt tokens a step computes: chunks within a budget, cut at row points, sharing what others just computed."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered

from flare_core.engine.config import SchedulerConfig
from flare_core.engine.device_cache import DeviceCache
from flare_core.engine.plan_builder import PlanBuilder
from flare_core.engine.sequence import Sequence
from flare_core.plan import RunKind

__all__ = ["PrefillPlanner"]

_FIRST_RUN_COST = 32
"""Budget that a FIRST run takes: one row alone costs a device about as much as a short chunk."""

_MAX_SHARES = 4
"""Prompts among which a step's budget is divided, so that a short prompt does not wait for a very long one."""


class PrefillPlanner:
    """Plans PREFILL and FIRST runs."""

    def __init__(self, config: SchedulerConfig, cache: DeviceCache) -> None:
        self._config = config
        self._cache = cache

    def is_row_point(self, position: int) -> bool:
        """A row is kept at this position of every prompt."""
        interval = self._config.row_interval_tokens
        return self._config.has_rows and interval > 0 and position > 0 and position % interval == 0

    def plan(self, ready: Ordered[Sequence], builder: PlanBuilder) -> Iterator[tuple[Sequence, int]]:
        """Add runs for ``ready`` sequences (those at or before ``prefill_end``), oldest first.

        Yields each sequence that moved, with the number of tokens that it took over from the device index. Two prompts
        with the same next page do not compute it both: the younger one waits for the next step and shares it.
        """
        budget = self._config.max_mixed_tokens if builder.num_decodes else self._config.max_prefill_tokens
        share = max(budget // min(max(len(ready), 1), _MAX_SHARES), self._config.page_tokens)
        claimed: set[bytes] = set()
        for sequence in ready:
            if budget <= 0:
                return
            num_adopted = self._adopt(sequence)
            if sequence.num_computed == sequence.prefill_end:
                builder.add_run(sequence, RunKind.FIRST, 1)
                budget -= _FIRST_RUN_COST
            elif self._claim(sequence, claimed, count := self._chunk(sequence, min(budget, share))):
                builder.add_run(sequence, RunKind.PREFILL, count)
                budget -= count
            elif not num_adopted:
                continue
            yield sequence, num_adopted

    def _chunk(self, sequence: Sequence, limit: int) -> int:
        """Tokens to compute now: to the end if they fit, otherwise up to a page's end; never across a row point."""
        start, end = sequence.num_computed, sequence.prefill_end
        interval = self._config.row_interval_tokens
        if self._config.has_rows and interval:
            end = min(end, (start // interval + 1) * interval)
        stop = min(end, start + limit)
        aligned = stop // sequence.page_tokens * sequence.page_tokens
        return (aligned if stop < end and aligned > start else stop) - start

    def _adopt(self, sequence: Sequence) -> int:
        """Use pages that the index has learnt since admission instead of computing them; the tokens gained.

        At a page's end the runner has not been told of the next page yet, so it can be exchanged; not under a row.
        """
        size = sequence.page_tokens
        gained = 0
        if self._cache.has_rows or not sequence.reads_cache or sequence.copy_source >= 0:
            return 0
        while sequence.num_computed % size == 0 and sequence.num_computed + size <= sequence.prefill_end:
            at = sequence.num_computed // size
            entry = self._cache.index.of_key(sequence.keys[at]) if at < len(sequence.keys) else None
            if entry is None or entry.tokens != sequence.tokens.bytes(at * size, at * size + size):
                break
            self._cache.pool.acquire((entry.page,))
            self._cache.release((sequence.pages[at],))
            sequence.pages[at] = entry.page
            sequence.num_computed += size
            gained += size
        return gained

    def _claim(self, sequence: Sequence, claimed: set[bytes], count: int) -> bool:
        """Whether no older sequence computes the same next page in this step; if so, claim the pages of the chunk."""
        if self._cache.has_rows or not sequence.reads_cache:
            return True
        size = sequence.page_tokens
        first = sequence.num_computed // size
        keys = sequence.keys[first : (sequence.num_computed + count) // size]
        if sequence.num_computed % size == 0 and first < len(sequence.keys) and sequence.keys[first] in claimed:
            return False
        claimed.update(keys)
        return True
