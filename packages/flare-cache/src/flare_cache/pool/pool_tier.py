"""The pool as the prefix store sees it: asynchronous lookups, puts behind the stores, and the session of both.

Everything but :meth:`PoolTier.turn_on`, :meth:`PoolTier.turn_off` and replies runs on the engine's thread; those only
leave a note and wake it. Nothing blocks, and no fault of the pool is more than a miss or a record that is not put.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from flare_cache.index import Record, RecordIndex
from flare_cache.jobs import Job, JobStatus
from flare_cache.outcomes import Outcome, RankFailure
from flare_cache.pool.break_even import BreakEven, Rates
from flare_cache.pool.messages import Find, Found, Reply
from flare_cache.pool.mirror import PoolMirror
from flare_cache.pool.outbox import Outbox
from flare_cache.pool.puts import PoolPuts, PoolRequests, PoolSession, extent_of
from flare_cache.tier_records import JobQueue, TierRecords
from flare_core.prefix import PrefixQuery, Restorable, Tier

__all__ = ["PoolStatistics", "PoolTier"]

LOOKUP_SECONDS = 0.5
"""A request waits at most this long for the pool's answer; then it goes on without."""
FETCH_PATIENCE_SECONDS = 2.0
"""A restore from the pool that others keep from beginning for so long is computed instead."""
QUIET_SECONDS = 1.0
MAX_QUIET_SECONDS = 30.0
"""After a lookup that was not answered, or a restore that a rank could not get: the pool is left alone for so long, and
twice as long after each further one, until a restore has succeeded or a session begins."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The pool's traffic now.

    Attributes:
        is_on: this rank zero takes part in a session.
        num_known: records in the mirror.
        num_in_pool: records of the source tier that the pool has.
        num_pending, pending_bytes, limit_bytes: of records to be put; bytes on the largest rank.
        num_put: since the start. dropped: records not put, by reason (see :class:`Outbox`).
        num_lookups, num_unanswered: of the pool.
        num_backlog: records found missing there that wait for room among the pending.
    """

    is_on: bool
    num_known: int
    num_in_pool: int
    num_pending: int
    pending_bytes: int
    limit_bytes: int
    num_put: int
    dropped: dict[str, int]
    num_lookups: int
    num_unanswered: int
    num_backlog: int
    rates: Rates


@dataclass(frozen=True, slots=True)
class _Lookup:
    query: PrefixQuery
    due_at: float
    first_page: int


class PoolTier:
    """See the module.

    Args:
        mirror: what is known of the pool's records.
        source: the tier that records are put from.
        pending_bytes, pending_seconds: bounds of what waits to be put.
        jobs: runs fetches and puts.
        tags: unique numbers, shared with whoever else submits jobs.
        wake: the engine is to poll; any thread, must not block.
        is_always_worth: restore, even where computing is quicker.
    """

    def __init__(
        self,
        mirror: PoolMirror,
        source: TierRecords,
        *,
        pending_bytes: int,
        jobs: JobQueue,
        tags: Iterator[int],
        wake: Callable[[], None],
        is_always_worth: bool = False,
        pending_seconds: float = 600.0,
    ) -> None:
        self.break_even = BreakEven(is_always_worth)
        self._mirror = mirror
        self._source = source
        outbox = Outbox(pending_bytes, pending_seconds, source.pin, source.unpin)
        self._puts = PoolPuts(source, outbox, jobs=jobs, tags=tags, note=self._note)
        self._wake = wake
        self._session: PoolSession | None = None
        self._notes: deque[Callable[[float], None]] = deque()
        self._lookups: dict[int, _Lookup] = {}
        self._ready: list[int] = []
        self._quiet_until = 0.0
        self._quiet_seconds = QUIET_SECONDS
        self._num_lookups = 0
        self._num_unanswered = 0

    # -- the session, from the agent's thread ----------------------------------------------------------------------

    def turn_on(self, session: bytes, connection: PoolRequests) -> None:
        """The ranks have agreed on ``session``. Any thread; does not block."""
        self._note(lambda _: self._turned_on(PoolSession(session, connection)))

    def turn_off(self, reason: str) -> None:
        """The session is over. Any thread; does not block."""
        self._note(lambda _: self._turned_off(reason))

    # -- lookups ---------------------------------------------------------------------------------------------------

    @property
    def index(self) -> RecordIndex:
        """What is known of the pool's records."""
        return self._mirror.index

    @property
    def is_on(self) -> bool:
        """Whether the pool can be asked."""
        return self._session is not None

    def is_readable(self, now: float) -> bool:
        """Whether it is to be asked and restored from: on, and not left alone for a moment."""
        return self._session is not None and now >= self._quiet_until

    def prepare(self, query: PrefixQuery, *, ticket: int, first_page: int, now: float) -> bool:
        """Ask the pool about what local tiers lack, from ``first_page`` on; False: there is nobody or nothing to ask.

        ``ticket`` comes with :meth:`take_ready` once the answer, or its time, has come.
        """
        if self._session is None or not self.is_readable(now) or first_page >= len(query.keys):
            return False
        self._num_lookups += 1
        self._lookups[ticket] = _Lookup(query, now + LOOKUP_SECONDS, first_page)
        self._find(ticket, self._session)
        return True

    def take_ready(self) -> list[int]:
        """Tickets of lookups that have ended since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def _find(self, ticket: int, session: PoolSession) -> None:
        lookup = self._lookups[ticket]
        query = lookup.query
        page_tokens = self._source.page_tokens
        start = len(query.keys) * page_tokens
        request = Find(
            root=query.root,
            keys=b"".join(query.keys),
            first_page=lookup.first_page,
            next_ids=query.token_ids[start : start + page_tokens].tobytes(),
        )
        session.requests.request_later(
            request,
            lambda reply: self._note(lambda now: self._found(ticket, session, reply, now)),
            timeout_seconds=LOOKUP_SECONDS,
        )

    def _found(self, ticket: int, session: PoolSession, reply: Reply | None, now: float) -> None:
        lookup = self._lookups.get(ticket)
        if lookup is None or session is not self._session:
            return
        match reply:
            case Found(manifests=manifests, num_pages=num_pages, more=more):
                num_bad = self._mirror.take(lookup.query, manifests)
                if num_bad:
                    _log.warning("the pool named %d records that cannot be this group's", num_bad)
                if more and num_pages > lookup.first_page:
                    self._lookups[ticket] = replace(lookup, first_page=num_pages)
                    self._find(ticket, session)
                    return
            case None:
                self._unanswered(now)
            case _:
                pass
        del self._lookups[ticket]
        self._ready.append(ticket)

    def _unanswered(self, now: float) -> None:
        self._num_unanswered += 1
        self._be_quiet(now)

    def _be_quiet(self, now: float) -> None:
        if now < self._quiet_until:
            return  # it was asked before the trouble was known
        self._quiet_until = now + self._quiet_seconds
        self._quiet_seconds = min(MAX_QUIET_SECONDS, 2 * self._quiet_seconds)

    def is_worth(self, found: Restorable, *, beyond: Restorable, now: float) -> bool:
        """Whether what the pool adds to ``beyond``, what local tiers have, is quicker restored than computed."""
        num_tokens = found.num_tokens - beyond.num_tokens
        if num_tokens <= 0:
            return False
        segments = [segment for segment in found.segments if segment.tier is Tier.POOL]
        num_bytes = 0
        for segment in segments:
            record = self.index.get(segment.record_key)
            if record is not None:
                num_bytes += record.num_bytes * segment.num_sections // max(1, record.identity.num_sections)
        return self.break_even.is_worth(num_tokens=num_tokens, num_bytes=num_bytes, now=now)

    # -- restores (see FetchSource) ----------------------------------------------------------------------------------

    def fetch_job(self, job: Job, record: Record) -> tuple[Job, float | None] | None:
        """The job in the session of now; None while the pool is off."""
        if self._session is None:
            return None
        ready = msgspec.structs.replace(job, pool_session=self._session.id, extent=extent_of(record))
        return ready, FETCH_PATIENCE_SECONDS

    def pin(self, record: Record) -> None:
        """Nothing here takes a record away from a transfer."""

    def unpin(self, record: Record) -> None:
        """See :meth:`pin`."""

    def fetch_failed(self, record: Record, failures: Sequence[RankFailure], now: float) -> None:
        """Forget it; where a rank could not reach the pool, leave that alone for a moment."""
        self._mirror.forget(record)
        if any(failure.status is not JobStatus.BAD_RECORD for failure in failures):
            self._be_quiet(now)

    def restored(self, num_bytes: int, seconds: float) -> None:
        """A restore from the pool has succeeded."""
        self._quiet_seconds = QUIET_SECONDS
        self.break_even.fetched(num_bytes, seconds)

    # -- puts --------------------------------------------------------------------------------------------------------

    def stored(self, record: Record, now: float) -> None:
        """The source tier has a new record: put it, unless the pool is known to have it."""
        known = self._mirror.index.get(record.key)
        if known is not None and known.is_usable:
            record.in_pool = True
        else:
            self._puts.stored(record, now)

    def settle(self, outcome: Outcome, now: float) -> bool:
        """Take the outcome of a put; False if it is none."""
        return self._puts.settle(outcome, now)

    # -- the engine's turn -------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nobody waits for the pool, and all notes were read. Records may still be pending."""
        return not (self._lookups or self._ready or self._notes)

    @property
    def has_pending(self) -> bool:
        """Records are on their way to the pool, or wait for it."""
        return self._puts.has_pending

    def advance(self, now: float) -> None:
        """Read the notes, end what is overdue, put what is next."""
        while self._notes:
            self._notes.popleft()(now)
        for ticket in [ticket for ticket, lookup in self._lookups.items() if now >= lookup.due_at]:
            del self._lookups[ticket]
            self._ready.append(ticket)
            self._unanswered(now)
        self._puts.advance(now)

    def statistics(self) -> PoolStatistics:
        """Counters now."""
        outbox = self._puts.outbox
        return PoolStatistics(
            is_on=self.is_on,
            num_known=len(self._mirror.index),
            num_in_pool=self._puts.num_in_pool,
            num_pending=len(outbox),
            pending_bytes=outbox.num_bytes,
            limit_bytes=outbox.limit_bytes,
            num_put=outbox.num_put,
            dropped=dict(outbox.dropped),
            num_lookups=self._num_lookups,
            num_unanswered=self._num_unanswered,
            num_backlog=self._puts.num_backlog,
            rates=self.break_even.rates,
        )

    def record_states(self) -> dict[str, str]:
        """ "in-pool", "pending" or "absent" for each stored record of the source tier, by key in hex. O(records)."""
        outbox = self._puts.outbox
        return {
            record.key.hex(): "in-pool" if record.in_pool else "pending" if record.key in outbox else "absent"
            for record in self._source.index.records()
            if record.is_stored
        }

    def pending_keys(self) -> list[bytes]:
        """Keys of the records that are to be put."""
        return self._puts.outbox.keys()

    def _turned_on(self, session: PoolSession) -> None:
        self._session = session
        self._mirror.clear()
        self._quiet_until, self._quiet_seconds = 0.0, QUIET_SECONDS
        self._puts.begin(session)

    def _turned_off(self, reason: str) -> None:
        _log.debug("no more pool for the engine: %s", reason)
        self._session = None
        self._puts.end()
        self._mirror.clear()
        # Whoever waits for an answer goes on without.
        self._ready += self._lookups
        self._lookups.clear()

    def _note(self, note: Callable[[float], None]) -> None:
        self._notes.append(note)
        self._wake()
