"""Restores under way: a job for each record, from whichever tier it is in, and what of the prefix came back.

Used by the engine's thread alone; jobs are run elsewhere. Which tier offers what is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flare_cache.cache_stats import CacheCounters
from flare_cache.index import Record, RecordIndex
from flare_cache.jobs import Job, JobOp, Section
from flare_cache.outcomes import Done, Failed, Outcome, RankFailure, ShardedLimits, Withdrawn, describe_failures
from flare_cache.tier_records import JobQueue
from flare_core.prefix import FetchFinished, PrefixQuery, Restorable, Segment, Tier

__all__ = ["FetchSource", "TierFetches"]

_FLOOR_BYTES_PER_SECOND = ShardedLimits().floor_bytes_per_second
_log = logging.getLogger(__name__)


class FetchSource(Protocol):
    """A tier as restores need it; :class:`flare_cache.tier_records.TierRecords` is one."""

    @property
    def index(self) -> RecordIndex:
        """Its records."""
        ...

    def fetch_job(self, job: Job, record: Record) -> tuple[Job, float | None] | None:
        """``job`` as it is to be sent, and the seconds it may wait for its turn, beside those that the jobs in front of
        it in the same restore may take; None: it cannot be restored now."""
        ...

    def pin(self, record: Record) -> None:
        """A restore needs the record."""
        ...

    def unpin(self, record: Record) -> None:
        """It does not any more."""
        ...

    def fetch_failed(self, record: Record, failures: Sequence[RankFailure], now: float) -> None:
        """Ranks could not restore it: offer it no more."""
        ...

    def restored(self, num_bytes: int, seconds: float) -> None:
        """A restore took this many bytes from here, on the largest rank, in so long."""
        ...


@dataclass(slots=True, eq=False)
class _Fetch:
    """A restore: its segments in order, and for each whether every rank has it (None: not known yet)."""

    ticket: int
    began_at: float
    num_device_tokens: int
    segments: tuple[Segment, ...]
    row_slot: int | None
    verdicts: list[bool | None]
    jobs: list[int] = field(default_factory=list)
    tags: dict[int, int] = field(default_factory=dict)
    num_bytes: dict[Tier, int] = field(default_factory=dict)
    num_asked_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """One segment's job."""

    fetch: _Fetch
    position: int
    tier: Tier
    record: Record


class TierFetches:
    """See the module.

    Args:
        sources: the tiers that can be restored from.
        jobs: runs the jobs.
        tags: unique numbers, shared with whoever else submits jobs.
        counters: what is counted.
        has_rows: the model resumes only at rows.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sources: Mapping[Tier, FetchSource],
        *,
        jobs: JobQueue,
        tags: Iterator[int],
        counters: CacheCounters,
        has_rows: bool,
        clock: Callable[[], float],
    ) -> None:
        self._sources = sources
        self._jobs = jobs
        self._tags = tags
        self._counters = counters
        self._has_rows = has_rows
        self._clock = clock
        self._transfers: dict[int, _Transfer] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._events: list[FetchFinished] = []

    @property
    def is_idle(self) -> bool:
        """No restore is under way, and every event was taken."""
        return not (self._transfers or self._fetches or self._events)

    def num_pending(self, tier: Tier) -> int:
        """Jobs that read ``tier``."""
        return sum(transfer.tier is tier for transfer in self._transfers.values())

    def take_events(self) -> list[FetchFinished]:
        """Restores that have ended since the last call."""
        events, self._events = self._events, []
        return events

    def begin(
        self,
        query: PrefixQuery,
        restorable: Restorable,
        *,
        ticket: int,
        pages: Sequence[int],
        row_slot: int | None,
        after_step: int,
    ) -> None:
        """Restore; the event carries ``ticket``."""
        segments = restorable.segments
        verdicts: list[bool | None] = [None] * len(segments)
        fetch = _Fetch(ticket, self._clock(), query.num_device_tokens, segments, row_slot, verdicts)
        self._fetches[ticket] = fetch
        for position, segment in enumerate(segments):
            record = self._fetchable(segment)
            at = segment.first_page - query.num_device_pages
            own_pages = pages[at : at + segment.num_sections]
            if record is None or not self._begin_transfer(fetch, position, record, pages=own_pages, after=after_step):
                # It went between lookup and fetch: the restored prefix ends in front of it.
                self._fail_from(fetch, position)
                break
        self._finish(fetch)

    def cancel(self, ticket: int) -> None:
        """Give up what has not begun of a restore."""
        fetch = self._fetches.get(ticket)
        if fetch is not None:
            for tag in fetch.tags.values():
                self._jobs.cancel(tag)

    def settle(self, outcome: Outcome, now: float) -> bool:
        """Take the outcome of a restore's job; False if it is none."""
        transfer = self._transfers.pop(outcome.tag, None)
        if transfer is None:
            return False
        fetch, position, source = transfer.fetch, transfer.position, self._sources[transfer.tier]
        del fetch.tags[position]
        match outcome:
            case Done(job=job, num_bytes=num_bytes):
                fetch.verdicts[position] = True
                fetch.jobs.append(job.job_id)
                fetch.num_bytes[transfer.tier] = fetch.num_bytes.get(transfer.tier, 0) + num_bytes
            case Failed(failures=failures):
                detail = describe_failures(failures)
                _log.warning("restore of %s failed, it is given up: %s", transfer.record.key.hex()[:16], detail)
                source.fetch_failed(transfer.record, failures, now)
                self._fail_from(fetch, position)
            case Withdrawn():
                self._fail_from(fetch, position)
        source.unpin(transfer.record)
        self._finish(fetch)
        return True

    def _fetchable(self, segment: Segment) -> Record | None:
        record = self._sources[segment.tier].index.get(segment.record_key)
        if record is None:
            return None
        num_sections = record.num_pages + (1 if record.tail_tokens else 0)
        if segment.first_section + segment.num_sections > num_sections or (segment.with_row and not record.has_row):
            return None
        return record

    def _begin_transfer(
        self, fetch: _Fetch, position: int, record: Record, *, pages: Sequence[int], after: int
    ) -> bool:
        segment = fetch.segments[position]
        source = self._sources[segment.tier]
        sections = tuple(Section(segment.first_section + number, page) for number, page in enumerate(pages))
        job = Job(
            job_id=0,
            op=JobOp.FETCH,
            tier=segment.tier,
            record=record.identity,
            after_step=after,
            sections=sections,
            row_slot=fetch.row_slot if segment.with_row else None,
        )
        ready = source.fetch_job(job, record)
        if ready is None:
            return False
        job, patience = ready
        tag = next(self._tags)
        source.pin(record)
        source.index.use(record)
        fetch.tags[position] = tag
        self._transfers[tag] = _Transfer(fetch, position, segment.tier, record)
        num_bytes = record.num_bytes * len(sections) // max(1, record.identity.num_sections)
        expires_at = None
        if patience is not None:
            expires_at = fetch.began_at + patience + fetch.num_asked_bytes / _FLOOR_BYTES_PER_SECOND
        fetch.num_asked_bytes += num_bytes
        self._jobs.submit(job, tag=tag, num_bytes=num_bytes, expires_at=expires_at)
        return True

    def _fail_from(self, fetch: _Fetch, position: int) -> None:
        """The restored prefix ends in front of this segment: give up what follows, as far as it has not begun."""
        for later in range(position, len(fetch.segments)):
            if later in fetch.tags:
                self._jobs.cancel(fetch.tags[later])
            else:
                fetch.verdicts[later] = False

    def _finish(self, fetch: _Fetch) -> None:
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
        if whole and len(fetch.num_bytes) == 1:
            # Of a mixture nobody knows which tier took the time.
            for tier, num_bytes in fetch.num_bytes.items():
                self._sources[tier].restored(num_bytes, self._clock() - fetch.began_at)
        num_tokens = fetch.num_device_tokens + sum(tokens.values())
        is_row_restored = whole and any(segment.with_row for segment in fetch.segments)
        self._events.append(FetchFinished(fetch.ticket, num_tokens, tokens, is_row_restored, tuple(fetch.jobs)))
