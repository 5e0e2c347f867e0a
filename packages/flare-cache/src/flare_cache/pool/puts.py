"""Records from a local tier into the pool, behind the stores: put by every rank, then committed. Engine's thread alone.

What a session is, and when there is one, is the pool tier's business; replies come back through its notes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from flare_cache.index import Record
from flare_cache.jobs import Job, JobOp
from flare_cache.outcomes import Done, Failed, Outcome, Withdrawn, describe_failures
from flare_cache.pool.manifest import Extent
from flare_cache.pool.messages import Commit, Committed, Refused, RefusedReason, Reply, Request
from flare_cache.pool.outbox import Outbox, OutRecord
from flare_cache.pool.reconcile import Reconciliation
from flare_cache.tier_records import JobQueue, TierRecords
from flare_core.prefix import Tier

__all__ = ["PoolPuts", "PoolRequests", "PoolSession", "extent_of"]

COMMIT_SECONDS = 10.0
MAX_UNDER_WAY = 4
_log = logging.getLogger(__name__)


class PoolRequests(Protocol):
    """A registered connection, for requests; :class:`flare_cache.pool.client.PoolClient` is one."""

    def request_later(
        self, request: Request, on_reply: Callable[[Reply | None], None], *, timeout_seconds: float
    ) -> None:
        """Ask without blocking; ``on_reply`` is called once, in any thread, with None where no answer came."""
        ...


@dataclass(frozen=True, slots=True)
class PoolSession:
    """What the ranks agreed on, as rank zero uses it."""

    id: bytes
    requests: PoolRequests


class PoolPuts:
    """See the module.

    Args:
        source: the tier that records are put from.
        outbox: what waits to be put.
        jobs: runs the puts.
        tags: unique numbers, shared with whoever else submits jobs.
        note: has a reply handled on the engine's thread; any thread.
    """

    def __init__(
        self,
        source: TierRecords,
        outbox: Outbox,
        *,
        jobs: JobQueue,
        tags: Iterator[int],
        note: Callable[[Callable[[float], None]], None],
    ) -> None:
        self.outbox = outbox
        self._source = source
        self._jobs = jobs
        self._tags = tags
        self._note = note
        self._session: PoolSession | None = None
        self._under_way: dict[int, OutRecord] = {}
        self._reconciliation: Reconciliation | None = None

    @property
    def has_pending(self) -> bool:
        """Records are on their way to the pool, or wait for it."""
        return bool(len(self.outbox)) or self._reconciliation is not None

    @property
    def num_backlog(self) -> int:
        """Records that are to be asked about, or found missing, and wait for room among the pending."""
        return 0 if self._reconciliation is None else self._reconciliation.num_left

    @property
    def num_in_pool(self) -> int:
        """Records of the source tier that the pool has. O(records)."""
        return sum(record.in_pool for record in self._source.index.records())

    def begin(self, session: PoolSession) -> None:
        """A session has begun: ask which of the tier's records the pool lacks."""
        self._session = session
        # Most recently used first, and parents before what extends them.
        keys = [record.key for record in self._source.index.records() if record.is_stored and record.is_usable]
        self._reconciliation = Reconciliation(keys[::-1])
        self._ask_next(session)

    def end(self) -> None:
        """The session is over; what is pending stays so."""
        self._session = None
        self._reconciliation = None

    def stored(self, record: Record, now: float) -> None:
        """The source tier has a new record, which the pool is not known to have."""
        self.outbox.add(record, now)

    def advance(self, now: float) -> None:
        """Give up what waits too long, put what is next."""
        self.outbox.drop_late(now)
        session, reconciliation = self._session, self._reconciliation
        if session is None:
            return
        if reconciliation is not None:
            self._refill(reconciliation, now)
            if reconciliation.is_asking:
                return
        while self.outbox.num_under_way < MAX_UNDER_WAY and (out := self.outbox.next(now)) is not None:
            if not self._has_ancestors(out.record, now):
                self.outbox.drop(out, "parent")
            elif out.record.parent is not None and out.record.parent.key in self.outbox:
                self.outbox.again(out, now, is_fault=False)
            else:
                self._submit(out, session)

    def settle(self, outcome: Outcome, now: float) -> bool:
        """Take the outcome of a put; False if it is none."""
        out = self._under_way.pop(outcome.tag, None)
        if out is None:
            return False
        session = self._session
        is_current = session is not None and outcome.job.pool_session == session.id
        match outcome:
            case Done(job=job) if session is not None and is_current:
                self._commit(out, job.extent, session)
            case Failed(failures=failures):
                _log.warning("%s was not put: %s", out.record.key.hex()[:16], describe_failures(failures))
                self.outbox.again(out, now, is_fault=is_current)
            case Done() | Withdrawn():
                self.outbox.again(out, now, is_fault=False)
        return True

    def _commit(self, out: OutRecord, extent: Extent, session: PoolSession) -> None:
        record = out.record
        session.requests.request_later(
            Commit(record=record.identity, extent=extent, token_ids=record.token_ids),
            lambda reply: self._note(lambda now: self._committed(out, session, reply, now)),
            timeout_seconds=COMMIT_SECONDS,
        )

    def _committed(self, out: OutRecord, session: PoolSession, reply: Reply | None, now: float) -> None:
        match reply:
            case Committed() | Refused(reason=RefusedReason.EXISTS):
                out.record.in_pool = True
                self.outbox.done(out)
            case Refused(reason=reason, detail=detail):
                _log.warning("%s was not committed: %s: %s", out.record.key.hex()[:16], reason, detail)
                if reason is RefusedReason.INCOMPLETE and out.record.parent is not None:
                    # It may have been evicted there since; if it has, the next try takes it along.
                    out.record.parent.in_pool = False
                self.outbox.again(out, now, is_fault=True)
            case _:
                self.outbox.again(out, now, is_fault=session is self._session)

    def _has_ancestors(self, record: Record, now: float) -> bool:
        """Whether the pool has what the record extends, or is about to get it: without that nobody would find it."""
        for ancestor in record.lineage():
            if ancestor is record or ancestor.in_pool or ancestor.key in self.outbox:
                continue
            if not self.outbox.add(ancestor, now):
                return False
        return True

    def _submit(self, out: OutRecord, session: PoolSession) -> None:
        record = out.record
        tag = next(self._tags)
        self._under_way[tag] = out
        job = Job(
            job_id=0,
            op=JobOp.PUT,
            tier=Tier.POOL,
            record=record.identity,
            pool_session=session.id,
            extent=extent_of(record),
        )
        self._jobs.submit(job, tag=tag, num_bytes=record.num_bytes)

    def _refill(self, reconciliation: Reconciliation, now: float) -> None:
        """Take into the outbox what the pool was found to lack, as far as there is room."""
        while (key := reconciliation.first_missing()) is not None:
            record = self._source.index.get(key)
            if record is not None and record.is_stored and record.is_usable and key not in self.outbox:
                if not self.outbox.has_room(record):
                    break
                self.outbox.add(record, now)
            reconciliation.drop_first()
        if reconciliation.is_over:
            self._reconciliation = None

    def _ask_next(self, session: PoolSession) -> None:
        request = None if self._reconciliation is None else self._reconciliation.next_request()
        if request is not None:
            session.requests.request_later(
                request,
                lambda reply: self._note(lambda _: self._answered(session, reply)),
                timeout_seconds=COMMIT_SECONDS,
            )

    def _answered(self, session: PoolSession, reply: Reply | None) -> None:
        reconciliation = self._reconciliation
        if session is not self._session or reconciliation is None:
            return
        for key, is_there in reconciliation.answered(reply):
            record = self._source.index.get(key)
            if record is not None:
                record.in_pool = is_there
            if is_there:
                self.outbox.settle(key)
        self._ask_next(session)


def extent_of(record: Record) -> Extent:
    """What is left of the record, as its shards are; ROW where nothing was cut."""
    identity = record.identity
    if identity.has_row and record.has_row:
        return Extent.ROW
    if identity.tail_tokens and not record.tail_tokens:
        return Extent.PAGES
    return Extent.TAIL if identity.has_row else Extent.ROW
