"""The prefix store that the scheduler uses: tickets over the tiers of records, memory before disk.

Implements :class:`flare_core.ports.PrefixStore` on rank zero, for any world size. Everything here runs on the engine's
thread and nothing blocks; transfers run elsewhere (see :class:`flare_cache.tier_records.JobQueue`). A store goes to
every tier; what was restored from disk reaches memory with the request's next store.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flare_cache.cache_stats import CacheCounters, CacheStatistics
from flare_cache.eviction import Budget
from flare_cache.index import Record, RecordIndex
from flare_cache.jobs import Job, JobOp, Section
from flare_cache.lookup import TierIndex, deepest_record, find_restorable
from flare_cache.outcomes import Done, Failed, Outcome, Withdrawn, describe_failures
from flare_cache.record_plan import FileSizes, RecordBounds
from flare_cache.tier_records import JobQueue, TierRecords
from flare_core.prefix import (
    FetchFinished,
    PrefixQuery,
    Restorable,
    Segment,
    StoreEvent,
    StoreFinished,
    StoreRequest,
    Tier,
)

__all__ = ["TierContent", "TierStore"]

_CHEAPEST_FIRST = (Tier.MEMORY, Tier.DISK)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierContent:
    """What a tier begins with: its index, and the agreed limit with what is charged against it."""

    index: RecordIndex
    budget: Budget


@dataclass(slots=True, eq=False)
class _Fetch:
    """A restore: its segments in order, and for each whether every rank has it (None: not known yet)."""

    ticket: int
    num_device_tokens: int
    segments: tuple[Segment, ...]
    row_slot: int | None
    verdicts: list[bool | None]
    jobs: list[int] = field(default_factory=list)
    tags: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """One segment's job."""

    fetch: _Fetch
    position: int
    records: TierRecords
    record: Record


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
        self._transfers: dict[int, _Transfer] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._stores: dict[int, _StoreTicket] = {}
        self._events: list[StoreEvent] = []

    @property
    def record_tokens(self) -> int:
        """Tokens of a full record: for models with rows, the scheduler cuts prefill chunks at multiples of it."""
        return self._bounds.record_tokens

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way in or out, and every event was polled: the process may end without losing a store."""
        has_open = self._transfers or self._fetches or self._stores or self._events
        return not has_open and all(records.is_idle for records in self._records.values())

    def lookup(self, query: PrefixQuery) -> Restorable:
        """See the port. What matches counts as used, the device's share too."""
        readable = [tier for tier in self._indexes if self._records[tier.tier].health.reads_stopped is None]
        for tier in readable:
            record = deepest_record(query, tier.index)
            if record is not None:
                tier.index.use(record)
        return find_restorable(
            query,
            readable,
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
        segments = restorable.segments
        fetch = _Fetch(next(self._tickets), query.num_device_tokens, segments, row_slot, [None] * len(segments))
        self._fetches[fetch.ticket] = fetch
        for position, segment in enumerate(segments):
            record = self._fetchable(segment)
            if record is None:
                # It went between lookup and fetch: the restored prefix ends in front of it.
                self._fail_from(fetch, position)
                break
            self._begin_transfer(
                fetch, position, record, pages=pages, first_page=query.num_device_pages, after=after_step
            )
        self._finish_fetch(fetch)
        return fetch.ticket

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
        events, self._events = self._events, []
        return events

    def cancel(self, ticket: int) -> None:
        """See the port."""
        fetch = self._fetches.get(ticket)
        if fetch is not None:
            for tag in fetch.tags.values():
                self._jobs.cancel(tag)

    def reset(self, tier: Tier) -> bool:
        """See the port."""
        records = self._records.get(tier)
        if records is not None:
            records.forget_all()
        return records is not None

    def statistics(self, *, num_jobs_waiting: int = 0, num_jobs_outstanding: int = 0) -> CacheStatistics:
        """A copy of the counters and of where each tier stands. From the engine's thread."""
        counters = self._counters
        fetching = [transfer.records.tier for transfer in self._transfers.values()]
        return CacheStatistics(
            tiers={tier: records.statistics(fetching.count(tier)) for tier, records in self._records.items()},
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

    def _fetchable(self, segment: Segment) -> Record | None:
        record = self._records[segment.tier].index.get(segment.record_key)
        if record is None or not (record.is_stored and record.is_usable):
            return None
        num_sections = record.num_pages + (1 if record.tail_tokens else 0)
        if segment.first_section + segment.num_sections > num_sections or (segment.with_row and not record.has_row):
            return None
        return record

    def _begin_transfer(
        self, fetch: _Fetch, position: int, record: Record, *, pages: Sequence[int], first_page: int, after: int
    ) -> None:
        segment = fetch.segments[position]
        records = self._records[segment.tier]
        at = segment.first_page - first_page
        sections = tuple(
            Section(segment.first_section + number, pages[at + number]) for number in range(segment.num_sections)
        )
        job = Job(
            job_id=0,
            op=JobOp.FETCH,
            tier=segment.tier,
            record=record.identity,
            after_step=after,
            sections=sections,
            row_slot=fetch.row_slot if segment.with_row else None,
        )
        tag = next(self._tags)
        records.pin(record)
        records.index.use(record)
        fetch.tags[position] = tag
        self._transfers[tag] = _Transfer(fetch, position, records, record)
        num_bytes = record.num_bytes * len(sections) // max(1, record.identity.num_sections)
        self._jobs.submit(job, tag=tag, num_bytes=num_bytes)

    def _settle(self, outcome: Outcome, now: float) -> None:
        transfer = self._transfers.pop(outcome.tag, None)
        if transfer is None:
            for records in self._records.values():
                if records.settle(outcome, now):
                    break
            return
        fetch, position = transfer.fetch, transfer.position
        del fetch.tags[position]
        match outcome:
            case Done(job=job):
                fetch.verdicts[position] = True
                fetch.jobs.append(job.job_id)
            case Failed(failures=failures):
                detail = describe_failures(failures)
                _log.warning("restore of %s failed, it is given up: %s", transfer.record.key.hex()[:16], detail)
                transfer.records.health.fetch_failed(transfer.record.key, failures, now)
                transfer.records.condemn(transfer.record)
                self._fail_from(fetch, position)
            case Withdrawn():
                self._fail_from(fetch, position)
        transfer.records.unpin(transfer.record)
        self._finish_fetch(fetch)

    def _fail_from(self, fetch: _Fetch, position: int) -> None:
        """The restored prefix ends in front of this segment: give up what follows, as far as it has not begun."""
        for later in range(position, len(fetch.segments)):
            if later in fetch.tags:
                self._jobs.cancel(fetch.tags[later])
            else:
                fetch.verdicts[later] = False

    def _finish_fetch(self, fetch: _Fetch) -> None:
        if None in fetch.verdicts:
            return
        del self._fetches[fetch.ticket]
        whole = all(fetch.verdicts)
        # Pages without the row at their end are of no use to a model with rows.
        num_segments = 0 if self._has_rows and not whole else (*fetch.verdicts, False).index(False)
        tokens: dict[Tier, int] = {}
        for segment in fetch.segments[:num_segments]:
            tokens[segment.tier] = tokens.get(segment.tier, 0) + segment.num_tokens
        for tier, num_tokens in tokens.items():
            self._counters.hit_tokens[tier] += num_tokens
        num_tokens = fetch.num_device_tokens + sum(tokens.values())
        is_row_restored = whole and any(segment.with_row for segment in fetch.segments)
        self._events.append(FetchFinished(fetch.ticket, num_tokens, tokens, is_row_restored, tuple(fetch.jobs)))

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
