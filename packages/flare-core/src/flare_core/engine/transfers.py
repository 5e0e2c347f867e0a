"""Fetches and stores under way between the device and the prefix store: who waits for which ticket, what is pinned."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from flare_core.engine.device_cache import DeviceCache
from flare_core.engine.plan_builder import PlanBuilder
from flare_core.engine.sequence import Sequence, SequenceState
from flare_core.engine.statistics import Statistics
from flare_core.ports import PrefixStore
from flare_core.prefix import LookupReady, PrefixQuery, StoreFinished, StoreRequest

__all__ = ["Transfers"]


@dataclass(frozen=True, slots=True)
class _StorePins:
    pages: Ordered[int]
    row_slot: int | None
    keys: Ordered[bytes]
    tail_source: int | None


class Transfers:
    """``min_tail_tokens``: a shorter partial page is not stored (models without rows)."""

    def __init__(
        self, cache: DeviceCache, store: PrefixStore | None, *, min_tail_tokens: int, statistics: Statistics
    ) -> None:
        self.fetching: dict[int, Sequence] = {}
        self._looking: dict[int, Sequence] = {}
        self._cache = cache
        self._store = store
        self._min_tail_tokens = min_tail_tokens
        self._statistics = statistics
        self._storing: dict[int, _StorePins] = {}

    @property
    def num_storing(self) -> int:
        """Stores whose pages are pinned."""
        return len(self._storing)

    def prepare(self, sequence: Sequence, *, num_device_pages: int) -> None:
        """Have the store find out what it must before it is asked for the sequence's prefix."""
        if self._store is None or not sequence.reads_cache:
            return
        sequence.lookup = self._store.prepare(self._query(sequence, num_device_pages, num_device_tokens=0))
        if sequence.lookup is not None:
            self._looking[sequence.lookup] = sequence

    def lookup_ready(self, event: LookupReady) -> None:
        """The store knows now."""
        self._looking.pop(event.ticket).lookup = None

    def _query(self, sequence: Sequence, num_device_pages: int, *, num_device_tokens: int) -> PrefixQuery:
        num_tokens = len(sequence.tokens) - 1
        return PrefixQuery(
            root=sequence.root,
            token_ids=sequence.tokens.view(0, num_tokens),
            keys=sequence.keys[: num_tokens // sequence.page_tokens],
            num_device_pages=num_device_pages,
            num_device_tokens=num_device_tokens,
        )

    def begin_fetch(self, sequence: Sequence, *, after_step: int, now: float) -> bool:
        """Look for what the device lacks, and begin to restore it into the sequence's pages; True when there is some.

        ``after_step``: no later step touches those pages or the slot.
        """
        if self._store is None:
            return False
        num_whole = sequence.num_registered
        query = self._query(sequence, num_whole, num_device_tokens=sequence.num_computed)
        restorable = self._store.lookup(query)
        if not restorable.segments or restorable.num_tokens <= sequence.num_computed:
            return False
        ticket = self._store.fetch(
            query,
            restorable,
            pages=sequence.pages[num_whole : sequence.num_pages_for(restorable.num_tokens)],
            row_slot=sequence.slot if self._cache.has_rows else None,
            after_step=after_step,
        )
        sequence.ticket = ticket
        sequence.fetch_start = now
        sequence.state = SequenceState.FETCHING
        self.fetching[ticket] = sequence
        return True

    def cancel_fetch(self, sequence: Sequence) -> None:
        """Ask the store to give up; the event still comes."""
        if self._store is not None and sequence.ticket is not None:
            self._store.cancel(sequence.ticket)

    def hand_over(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> None:
        """Keep the row at ``num_tokens``, where the sequence now stands, and offer the prefix to the store.

        Copies that this takes become part of ``builder``'s plan.
        """
        snapshot = self._snapshot(sequence, num_tokens, builder) if self._cache.has_rows else None
        if self._store is None or (self._cache.has_rows and snapshot is None):
            return
        tail_page, num_tokens = self._copy_tail(sequence, num_tokens, builder)
        if num_tokens <= sequence.num_handed:
            return
        num_whole = num_tokens // sequence.page_tokens
        request = StoreRequest(
            root=sequence.root,
            token_ids=sequence.tokens.view(0, num_tokens),
            keys=sequence.keys[:num_whole],
            pages=sequence.pages[:num_whole],
            tail_page=tail_page,
            row_slot=snapshot,
            after_step=builder.step if builder.has_copies else sequence.last_step,
        )
        ticket = self._store.store(request)
        if ticket is None:
            if tail_page is not None:
                builder.release_page_later(tail_page)
            return
        pages = list(request.pages) if tail_page is None else [*request.pages, tail_page]
        self._cache.pool.pin(pages)
        if tail_page is not None:
            self._cache.release((tail_page,))
        if snapshot is not None:
            self._cache.rows.hold(snapshot)
        tail_source = None if tail_page is None else sequence.pages[num_whole]
        self._storing[ticket] = _StorePins(pages, snapshot, request.keys, tail_source)
        self._cache.mark_handed(sequence, num_tokens)

    def _snapshot(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> int | None:
        slot = self._cache.take_snapshot()
        if slot is None:
            return None
        builder.take_snapshot(sequence, num_tokens, slot)
        return slot

    def _copy_tail(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> tuple[int | None, int]:
        """Copy of the partial page, if it is worth storing, and how many tokens there are to store then."""
        num_whole, num_tail = divmod(num_tokens, sequence.page_tokens)
        if not num_tail or num_tokens <= sequence.num_handed:
            return None, num_tokens
        without = num_whole * sequence.page_tokens
        if num_tail < self._min_tail_tokens and not self._cache.has_rows:
            return None, without
        pages = self._cache.allocate(1)
        if pages is None:
            return None, 0 if self._cache.has_rows else without
        builder.copy_page(sequence.pages[num_whole], pages[0], num_tail)
        return pages[0], num_tokens

    def finish_store(self, event: StoreFinished) -> None:
        """A store ended: unpin."""
        pins = self._storing.pop(event.ticket)
        if event.failure is not None:
            self._statistics.num_store_failures += 1
            self._cache.forget_handed(pins.keys, pins.tail_source)
        self._cache.unpin(reversed(pins.pages))
        if pins.row_slot is not None:
            self._cache.rows.drop(pins.row_slot)

    def quarantine(self) -> None:
        """Ranks lost account of each other: nothing that a transfer may still touch is used again."""
        for pins in self._storing.values():
            self._cache.pool.quarantine(pins.pages)
            if pins.row_slot is not None:
                self._cache.rows.quarantine(pins.row_slot)
        for sequence in self.fetching.values():
            self._cache.pool.quarantine(sequence.pages[sequence.num_registered :])
            self._cache.rows.quarantine(sequence.slot)
