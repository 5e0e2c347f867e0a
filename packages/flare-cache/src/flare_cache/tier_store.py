"""The prefix store that the scheduler uses: tickets over the tiers of records, memory before disk before the pool.

Implements :class:`flare_core.ports.PrefixStore` on rank zero, for any world size. Everything here runs on the engine's
thread and nothing blocks; transfers run elsewhere (see :class:`flare_cache.tier_records.JobQueue`). A store goes to
every tier but the pool, which is given what a tier has stored; what was restored from a slower tier reaches the quicker
ones with the request's next store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flare_cache.cache_stats import CacheCounters, CacheStatistics
from flare_cache.eviction import Budget
from flare_cache.index import RecordIndex
from flare_cache.lookup import TierIndex, deepest_record, find_restorable
from flare_cache.outcomes import Outcome
from flare_cache.pool.mirror import PoolMirror
from flare_cache.pool.pool_tier import PoolTier
from flare_cache.record_plan import FileSizes, RecordBounds
from flare_cache.tier_fetches import FetchSource, TierFetches
from flare_cache.tier_records import JobQueue, TierRecords
from flare_core.prefix import (
    LookupReady,
    PrefixQuery,
    Restorable,
    StoreEvent,
    StoreFinished,
    StoreRequest,
    Tier,
)

__all__ = ["PoolTierSettings", "TierContent", "TierStore"]

_CHEAPEST_FIRST = (Tier.MEMORY, Tier.DISK)


@dataclass(frozen=True, slots=True)
class TierContent:
    """What a tier begins with: its index, and the agreed limit with what is charged against it."""

    index: RecordIndex
    budget: Budget


@dataclass(frozen=True, slots=True)
class PoolTierSettings:
    """Of the pool as a tier.

    Attributes:
        world_size: ranks of this group: what a record of the pool must have shards for.
        pending_bytes: records to be put, on the largest rank.
        wake: the engine is to poll; any thread, must not block.
        is_always_worth: restore, even where computing is quicker.
    """

    world_size: int
    pending_bytes: int
    wake: Callable[[], None]
    is_always_worth: bool = False


@dataclass(slots=True)
class _StoreTicket:
    num_left: int
    num_stored: int = 0
    failure: str | None = None


class TierStore:
    """See the module.

    Args:
        tiers: what each configured tier begins with (see :mod:`flare_cache.join_set`).
        bounds, sizes: of this group's records.
        jobs: the dispatcher.
        has_rows: the model resumes only at rows.
        clock: monotonic seconds.
        draw_store_id: 16 random bytes.
        store_seconds: a record waits at most this long at rank zero for its turn, then it is dropped.
        min_restore_tokens: a restore that adds fewer tokens is not offered.
    """

    def __init__(
        self,
        tiers: Mapping[Tier, TierContent],
        *,
        bounds: RecordBounds,
        sizes: FileSizes,
        jobs: JobQueue,
        has_rows: bool,
        clock: Callable[[], float],
        draw_store_id: Callable[[], bytes],
        store_seconds: float = 10.0,
        min_restore_tokens: int = 1,
    ) -> None:
        self._bounds = bounds
        self._jobs = jobs
        self._has_rows = has_rows
        self._clock = clock
        self._min_restore_tokens = min_restore_tokens
        self._counters = CacheCounters()
        self._tags = itertools.count(1)
        self._tickets = itertools.count(1)
        self._records = {
            tier: TierRecords(
                tier,
                tiers[tier].index,
                tiers[tier].budget,
                sizes=sizes,
                bounds=bounds,
                jobs=jobs,
                tags=self._tags,
                draw_store_id=draw_store_id,
                counters=self._counters,
                store_seconds=store_seconds,
            )
            for tier in _CHEAPEST_FIRST
            if tier in tiers
        }
        self._indexes = [TierIndex(tier, records.index) for tier, records in self._records.items()]
        self._pool: PoolTier | None = None
        self._sources: dict[Tier, FetchSource] = dict(self._records)
        self._fetches = TierFetches(
            self._sources, jobs=jobs, tags=self._tags, counters=self._counters, has_rows=has_rows, clock=clock
        )
        self._stores: dict[int, _StoreTicket] = {}
        self._events: list[StoreEvent] = []

    @property
    def record_tokens(self) -> int:
        """Tokens of a full record: for models with rows, the scheduler cuts prefill chunks at multiples of it."""
        return self._bounds.record_tokens

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way in or out, and every event was polled: the process may end without losing a store."""
        has_open = self._stores or self._events or not self._fetches.is_idle
        if self._pool is not None and not self._pool.is_idle:
            return False
        return not has_open and all(records.is_idle for records in self._records.values())

    def open_pool(self, settings: PoolTierSettings) -> PoolTier:
        """Have a pool as the last tier: put into it what the most lasting tier stores. To be called once, at first."""
        source = self._records[Tier.DISK if Tier.DISK in self._records else Tier.MEMORY]
        mirror = PoolMirror(page_tokens=self._bounds.page_tokens, world_size=settings.world_size)
        pool = PoolTier(
            mirror,
            source,
            # What is pinned cannot be evicted: a pool that is away must not fill the tier with what it is owed.
            pending_bytes=min(settings.pending_bytes, source.statistics(0).limit_bytes // 2),
            jobs=self._jobs,
            tags=self._tags,
            wake=settings.wake,
            is_always_worth=settings.is_always_worth,
        )
        source.tell_stored(pool.stored)
        self._pool = pool
        self._sources[Tier.POOL] = pool
        return pool

    @property
    def pool(self) -> PoolTier | None:
        """The pool, if there is one."""
        return self._pool

    def prepare(self, query: PrefixQuery) -> int | None:
        """See the port."""
        pool, now = self._pool, self._clock()
        if pool is None or not pool.is_readable(now):
            return None
        num_local = max((tier.index.num_present(query.keys) for tier in self._readable()), default=0)
        ticket = next(self._tickets)
        first_page = max(num_local, query.num_device_pages)
        return ticket if pool.prepare(query, ticket=ticket, first_page=first_page, now=now) else None

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """See the port."""
        if self._pool is not None:
            self._pool.break_even.prefilled(num_tokens, seconds)

    def lookup(self, query: PrefixQuery) -> Restorable:
        """See the port. What matches counts as used, the device's share too."""
        readable = self._readable()
        for tier in readable:
            record = deepest_record(query, tier.index)
            if record is not None:
                tier.index.use(record)
        local = self._find(query, readable)
        pool, now = self._pool, self._clock()
        if pool is None or not pool.is_readable(now):
            return local
        found = self._find(query, [*readable, TierIndex(Tier.POOL, pool.index)])
        return found if pool.is_worth(found, beyond=local, now=now) else local

    def _readable(self) -> list[TierIndex]:
        return [tier for tier in self._indexes if self._records[tier.tier].health.reads_stopped is None]

    def _find(self, query: PrefixQuery, tiers: Sequence[TierIndex]) -> Restorable:
        return find_restorable(
            query,
            tiers,
            page_tokens=self._bounds.page_tokens,
            has_rows=self._has_rows,
            min_tokens=self._min_restore_tokens,
        )

    def fetch(
        self,
        query: PrefixQuery,
        restorable: Restorable,
        *,
        pages: Sequence[int],
        row_slot: int | None,
        after_step: int,
    ) -> int:
        """See the port."""
        ticket = next(self._tickets)
        self._fetches.begin(query, restorable, ticket=ticket, pages=pages, row_slot=row_slot, after_step=after_step)
        return ticket

    def store(self, request: StoreRequest) -> int | None:
        """See the port."""
        ticket, now = next(self._tickets), self._clock()
        num_records = sum(records.plan(request, ticket, now) for records in self._records.values())
        if not num_records:
            return None
        self._stores[ticket] = _StoreTicket(num_records)
        self._advance(now)
        return ticket

    def poll(self) -> Sequence[StoreEvent]:
        """See the port."""
        outcomes = self._jobs.take()
        now = self._clock()
        for outcome in outcomes:
            self._counters.count_job(outcome)
            self._settle(outcome, now)
        self._advance(now)
        events: list[StoreEvent] = [*self._events, *self._fetches.take_events()]
        if self._pool is not None:
            events += map(LookupReady, self._pool.take_ready())
        self._events = []
        return events

    def cancel(self, ticket: int) -> None:
        """See the port."""
        self._fetches.cancel(ticket)

    def reset(self, tier: Tier) -> bool:
        """See the port."""
        records = self._records.get(tier)
        if records is not None:
            records.forget_all()
        return records is not None

    def statistics(self, *, num_jobs_waiting: int = 0, num_jobs_outstanding: int = 0) -> CacheStatistics:
        """A copy of the counters and of where each tier stands. From the engine's thread."""
        counters = self._counters
        return CacheStatistics(
            tiers={
                tier: records.statistics(self._fetches.num_pending(tier)) for tier, records in self._records.items()
            },
            hit_tokens=dict(counters.hit_tokens),
            records_stored=dict(counters.records_stored),
            records_evicted=dict(counters.records_evicted),
            records_failed=dict(counters.records_failed),
            stores_dropped=dict(counters.stores_dropped),
            job_times={rank: times.snapshot() for rank, times in sorted(counters.job_times.items())},
            num_jobs_waiting=num_jobs_waiting,
            num_jobs_outstanding=num_jobs_outstanding,
        )

    def keys_by_use(self, tier: Tier) -> list[bytes]:
        """Keys of the tier's stored records, oldest use first: the order that ``join.idx`` keeps."""
        records = self._records.get(tier)
        return [] if records is None else [record.key for record in records.index.records() if record.is_stored]

    def _settle(self, outcome: Outcome, now: float) -> None:
        if self._fetches.settle(outcome, now) or (self._pool is not None and self._pool.settle(outcome, now)):
            return
        for records in self._records.values():
            if records.settle(outcome, now):
                break

    def _advance(self, now: float) -> None:
        for records in self._records.values():
            records.advance(now)
            for end in records.take_ends():
                ticket = self._stores[end.ticket]
                ticket.num_left -= 1
                if end.failure is None:
                    ticket.num_stored += 1
                elif ticket.failure is None:
                    ticket.failure = end.failure
                if not ticket.num_left:
                    del self._stores[end.ticket]
                    self._events.append(StoreFinished(end.ticket, ticket.num_stored, ticket.failure))
        if self._pool is not None:
            self._pool.advance(now)
