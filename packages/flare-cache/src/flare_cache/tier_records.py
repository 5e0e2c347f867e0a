"""One tier's records at rank zero: what is being stored, what must go, and what each job's outcome means for them.

A record on its way waits until its parent is stored and its bytes are reserved; it is then one job. Removal hides a
record at once, and credits its bytes when every rank has unlinked it. Used by the engine's thread alone; jobs are run
elsewhere, and how is not known here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from flare_cache.cache_stats import CacheCounters, TierStatistics
from flare_cache.eviction import Budget, DropRow, Evict, choose_relief
from flare_cache.index import Record, RecordIndex
from flare_cache.jobs import Job, JobOp, RecordIdentity
from flare_cache.outcomes import Done, Failed, Outcome, RankFailure, Withdrawn, describe_failures
from flare_cache.record_plan import FileSizes, RecordBounds, new_record, plan_replacement, plan_store
from flare_cache.tier_health import TierHealth
from flare_cache.tier_work import Removal, Store, StoreEnd, Wish
from flare_core.prefix import StoreRequest, Tier

__all__ = ["JobQueue", "TierRecords"]

_log = logging.getLogger(__name__)


class JobQueue(Protocol):
    """Runs jobs on every rank; :class:`flare_cache.dispatcher.Dispatcher` is one. Nothing here blocks."""

    def submit(self, job: Job, *, tag: int, num_bytes: int, expires_at: float | None = None) -> None:
        """Have ``job`` (id 0) run; ``take`` gives its outcome with ``tag``."""
        ...

    def cancel(self, tag: int) -> None:
        """Withdraw a job that has not begun; its outcome still comes."""
        ...

    def take(self) -> Sequence[Outcome]:
        """Outcomes since the last call. Raises Poisoned."""
        ...


class TierRecords:
    """See the module.

    Args:
        tier: which.
        index: with what join kept.
        budget: with what that is charged.
        sizes, bounds: of this group's records.
        jobs: runs them.
        tags: unique numbers, shared by the tiers.
        draw_store_id: 16 random bytes for each store.
        counters: what is counted.
        store_seconds: a record that could be stored waits at most this long for its turn.
    """

    def __init__(
        self,
        tier: Tier,
        index: RecordIndex,
        budget: Budget,
        *,
        sizes: FileSizes,
        bounds: RecordBounds,
        jobs: JobQueue,
        tags: Iterator[int],
        draw_store_id: Callable[[], bytes],
        counters: CacheCounters,
        store_seconds: float,
    ) -> None:
        self.tier = tier
        self.index = index
        self.health = TierHealth(tier)
        self._budget = budget
        self._sizes = sizes
        self._bounds = bounds
        self._jobs = jobs
        self._tags = tags
        self._draw_store_id = draw_store_id
        self._counters = counters
        self._store_seconds = store_seconds
        self._ready: deque[tuple[Store, float]] = deque()
        self._by_parent: dict[bytes, list[Store]] = {}
        self._storing: dict[int, Store] = {}
        self._removing: dict[int, Removal] = {}
        self._unlinking: set[bytes] = set()
        self._removed_bytes_due = 0
        self._doomed: set[bytes] = set()
        self._covered: dict[bytes, Record] = {}
        self._ends: list[StoreEnd] = []
        self._on_stored: Callable[[Record, float], None] | None = None

    @property
    def page_tokens(self) -> int:
        """Tokens of a whole page."""
        return self._bounds.page_tokens

    def tell_stored(self, on_stored: Callable[[Record, float], None]) -> None:
        """Call ``on_stored`` with every record that every rank has stored, and the time."""
        self._on_stored = on_stored

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way in or out."""
        return not (self._ready or self._by_parent or self._storing or self._removing)

    def statistics(self, num_fetches: int) -> TierStatistics:
        """The tier now."""
        num_stores = len(self._ready) + len(self._storing) + sum(map(len, self._by_parent.values()))
        return TierStatistics(
            tier=self.tier,
            num_records=len(self.index),
            charged_bytes=self._budget.charged_bytes,
            limit_bytes=self._budget.limit_bytes,
            num_stores_pending=num_stores,
            num_fetches_pending=num_fetches,
            stores_stopped=self.health.stores_stopped,
            reads_stopped=self.health.reads_stopped,
        )

    def take_ends(self) -> list[StoreEnd]:
        """Records settled since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def plan(self, request: StoreRequest, ticket: int, now: float) -> int:
        """Plan what this tier lacks of ``request``; how many records are on their way for ``ticket``."""
        planned = plan_store(request, self.index, self._bounds, draw_store_id=self._draw_store_id)
        refusal = self.health.refusal(now)
        if refusal is not None:
            if planned:
                self._counters.stores_dropped[refusal] += len(planned)
            return 0
        for one in planned:
            self._begin(Wish(one, ticket, request.after_step), now)
        if planned:
            return len(planned)
        whole = plan_replacement(request, self.index, self._bounds, draw_store_id=self._draw_store_id)
        if whole is None:
            return 0
        self._unlink(whole.replaced, successor=Wish(whole.planned, ticket, request.after_step))
        return 1

    def advance(self, now: float) -> None:
        """Submit what is ready and fits; make room for what does not."""
        while self._ready:
            store, expires_at = self._ready[0]
            refusal = "late" if now >= expires_at else self.health.refusal(now)
            if refusal is not None:
                self._ready.popleft()
                self._give_up(store, refusal)
                continue
            shortage = self._budget.shortage(store.record.num_bytes)
            if shortage > self._removed_bytes_due:
                self._make_room(shortage - self._removed_bytes_due)
            if shortage > self._removed_bytes_due:
                self._ready.popleft()
                self._give_up(store, "full")
            elif shortage:
                return
            else:
                self._ready.popleft()
                self._submit(store, expires_at)

    def settle(self, outcome: Outcome, now: float) -> bool:
        """Take the outcome of a store, unlink or truncation of this tier; False if it is none of its jobs."""
        if (store := self._storing.pop(outcome.tag, None)) is not None:
            self._stored(store, outcome, now)
            return True
        if (removal := self._removing.pop(outcome.tag, None)) is not None:
            self._removed(removal, outcome, now)
            return True
        return False

    def pin(self, record: Record) -> None:
        """A transfer needs the record where it is, until :meth:`unpin`."""
        record.num_pins += 1

    def unpin(self, record: Record) -> None:
        """The transfer has ended; what waited for that goes on."""
        record.num_pins -= 1
        if record.num_pins:
            return
        if record.key in self._covered:
            del self._covered[record.key]
            self._drop_tail(record)
        self._reap(record)

    def fetch_job(self, job: Job, record: Record) -> tuple[Job, float | None] | None:
        """The job as it is, however long it waits; None where the record cannot be restored any more."""
        return (job, None) if record.is_stored and record.is_usable else None

    def fetch_failed(self, record: Record, failures: Sequence[RankFailure], now: float) -> None:
        """Ranks could not restore the record: it and what extends it goes."""
        self.health.fetch_failed(record.key, failures, now)
        self.condemn(record)

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Nothing to learn: what is on this host is always worth it."""

    def condemn(self, record: Record) -> None:
        """The record failed a rank: it and all that extends it is offered no more, and goes, leaves first."""
        self._counters.records_failed[self.tier] += 1
        subtree = [one for one in record.subtree() if one.key not in self._unlinking]
        for one in subtree:
            if one.is_usable:
                self.index.hide(one)
            self._doomed.add(one.key)
        self._fail_waiting(record, "parent")
        for one in reversed(subtree):
            self._reap(one)

    def forget_all(self) -> None:
        """Unlink everything that nothing pins."""
        for relief in choose_relief(self.index, 1 << 63, row_bytes=lambda _: 0):
            if isinstance(relief, Evict):
                self._unlink(relief.record)

    def _begin(self, wish: Wish, now: float) -> None:
        identity = wish.planned.identity
        parent = self.index.get(identity.parent_key) if identity.parent_key else None
        record = new_record(wish.planned, parent, self._full_bytes(identity))
        self.index.add(record)
        store = Store(record, wish)
        if parent is None or parent.is_stored:
            self._ready.append((store, now + self._store_seconds))
        else:
            self._by_parent.setdefault(parent.key, []).append(store)

    def _full_bytes(self, identity: RecordIdentity) -> int:
        return self._sizes.largest(identity, has_tail=True, has_row=True)

    def _left_bytes(self, record: Record, *, has_tail: bool, has_row: bool) -> int:
        return self._sizes.largest(record.identity, has_tail=has_tail, has_row=has_row)

    def _submit(self, store: Store, expires_at: float) -> None:
        record, planned = store.record, store.wish.planned
        self._budget.charge(record.num_bytes)
        tag = next(self._tags)
        self._storing[tag] = store
        self.health.began(tag)
        job = Job(
            job_id=0,
            op=JobOp.STORE,
            tier=self.tier,
            record=record.identity,
            after_step=store.wish.after_step,
            sections=planned.sections,
            row_slot=planned.row_slot,
            token_ids=planned.token_ids,
        )
        self._jobs.submit(job, tag=tag, num_bytes=record.num_bytes, expires_at=expires_at)

    def _stored(self, store: Store, outcome: Outcome, now: float) -> None:
        record = store.record
        self.health.ended(outcome, now)
        match outcome:
            case Done():
                self._counters.records_stored[self.tier] += 1
                record.is_stored = True
                if record.key in self._doomed:
                    self._ends.append(StoreEnd(store.wish.ticket, "an ancestor failed"))
                    self._reap(record)
                    return
                self.index.mark_stored(record)
                self._ends.append(StoreEnd(store.wish.ticket, None))
                for child in self._by_parent.pop(record.key, ()):
                    self._ready.append((child, now + self._store_seconds))
                if self._on_stored is not None:
                    self._on_stored(record, now)
                for other in self.index.covered_tails(record):
                    self._drop_tail(other)
            case Failed(failures=failures, cleanup=cleanup):
                detail = describe_failures(failures, cleanup)
                _log.warning("store of %s failed: %s", record.key.hex()[:16], detail)
                self._give_up(store, "failed", detail=detail, is_buried=bool(cleanup))
                if not cleanup:
                    self._budget.credit(record.num_bytes)
            case Withdrawn(reason=reason):
                self._budget.credit(record.num_bytes)
                self._give_up(store, str(reason))

    def _give_up(self, store: Store, reason: str, *, detail: str = "", is_buried: bool = False) -> None:
        """The record is not stored, nor is what waits for it."""
        record, parent = store.record, store.record.parent
        self._drop(store.wish.ticket, reason, detail)
        self._fail_waiting(record, "parent")
        self._doomed.discard(record.key)
        if record.is_usable:
            self.index.hide(record)
        if is_buried:
            self.index.bury(record)
        else:
            self.index.remove(record)
        if parent is not None:
            self._reap(parent)

    def _drop(self, ticket: int, reason: str, detail: str = "") -> None:
        self._counters.stores_dropped[reason] += 1
        self._ends.append(StoreEnd(ticket, detail or reason))

    def _fail_waiting(self, record: Record, reason: str) -> None:
        """Give up every record that waits below ``record``, children before parents."""
        for child in [*record.children.values()]:
            self._fail_waiting(child, reason)
        for waiting in self._by_parent.pop(record.key, ()):
            self._give_up(waiting, reason)
        for entry in [entry for entry in self._ready if entry[0].record.parent is record]:
            self._ready.remove(entry)
            self._give_up(entry[0], reason)

    def _make_room(self, num_bytes: int) -> None:
        """Begin to free ``num_bytes``, or nothing at all if that much cannot go."""
        chosen = choose_relief(self.index, num_bytes, row_bytes=self._row_bytes)
        if sum(relief.num_bytes for relief in chosen) < num_bytes:
            return
        for relief in chosen:
            match relief:
                case Evict(record):
                    self._counters.records_evicted[self.tier] += 1
                    self._unlink(record)
                case DropRow(record):
                    self._truncate(record, keep_tail=True)

    def _row_bytes(self, record: Record) -> int:
        has_tail = bool(record.tail_tokens)
        return record.num_bytes - self._left_bytes(record, has_tail=has_tail, has_row=False)

    def _drop_tail(self, record: Record) -> None:
        """Compact a record whose tail another page or tail begins with; later, if a transfer needs it now."""
        if not (record.is_stored and record.is_usable and record.tail_tokens) or record.has_row:
            return
        if record.num_pins:
            self._covered[record.key] = record
        elif record.num_pages:
            self._truncate(record, keep_tail=False)
        else:
            self._unlink(record)

    def _truncate(self, record: Record, *, keep_tail: bool) -> None:
        keep_tail = keep_tail and record.tail_tokens > 0
        num_bytes = record.num_bytes - self._left_bytes(record, has_tail=keep_tail, has_row=False)
        self.index.truncated(record, keep_tail=keep_tail)
        # Pinned meanwhile, so that an unlink cannot overtake it.
        self.pin(record)
        self._remove(Removal(record, JobOp.TRUNCATE, num_bytes), keep_tail=keep_tail)

    def _unlink(self, record: Record, *, successor: Wish | None = None) -> None:
        if record.is_usable:
            self.index.hide(record)
        self._unlinking.add(record.key)
        self._remove(Removal(record, JobOp.UNLINK, record.num_bytes, successor))

    def _remove(self, removal: Removal, *, keep_tail: bool = False) -> None:
        tag = next(self._tags)
        self._removing[tag] = removal
        self._removed_bytes_due += removal.num_bytes
        job = Job(job_id=0, op=removal.op, tier=self.tier, record=removal.record.identity, keep_tail=keep_tail)
        self._jobs.submit(job, tag=tag, num_bytes=0)

    def _removed(self, removal: Removal, outcome: Outcome, now: float) -> None:
        record, successor = removal.record, removal.successor
        self._removed_bytes_due -= removal.num_bytes
        is_done = isinstance(outcome, Done)
        if is_done:
            self._budget.credit(removal.num_bytes)
        if removal.op is JobOp.TRUNCATE:
            if is_done:
                record.num_bytes -= removal.num_bytes
            self.unpin(record)
            return
        self._unlinking.discard(record.key)
        parent = record.parent
        if is_done:
            self.index.remove(record)
        else:
            # Some rank still holds the file: its bytes stay charged and its name stays taken until the next join.
            self.index.bury(record)
        if successor is None:
            return
        if is_done and (parent is None or parent.is_usable):
            self._begin(successor, now)
        else:
            self._drop(successor.ticket, "parent" if is_done else "failed")

    def _reap(self, record: Record) -> None:
        """Unlink a doomed record once nothing needs it and nothing that extends it is left to go first."""
        while record.key in self._doomed and record.is_stored and not record.num_pins:
            if any(key in self._doomed for key in record.children):
                return
            self._doomed.discard(record.key)
            self._unlink(record)
            if record.parent is None:
                return
            record = record.parent
