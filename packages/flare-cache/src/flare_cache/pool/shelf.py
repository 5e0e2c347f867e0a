"""The pool as one rank reaches it: its shard of a record fetched into pages, or read from its own shelf and put.

Every blocking call is bounded by the job's own budget, which ends before rank zero's deadline for it: whatever the pool
does, the job ends as a miss or a failure and poisons nothing. What is received lands in staging, is verified by the
record's own digests, and only then goes on to pages. Sessions are agreed on elsewhere (:mod:`agreement`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flare_cache.host_memory import Passage, Window, aligned_buffer, copy_views
from flare_cache.job_check import POOL_SESSION_BYTES
from flare_cache.jobs import Job
from flare_cache.outcomes import ShardedLimits
from flare_cache.pool.bulk_client import BulkConnections, TcpRange
from flare_cache.pool.client import PoolClient, PoolUnavailable
from flare_cache.pool.messages import (
    Done,
    GetStart,
    Grant,
    PutFinish,
    PutStart,
    Refused,
    RefusedReason,
    Release,
    Reply,
    ReportBad,
    Request,
)
from flare_cache.pool.shard_source import ShardReader, ShardSource
from flare_cache.pool.staging import BufferState, StagingBuffers
from flare_cache.record import Problem, RecordError, RecordHeader, check_header, decode_header, file_layout
from flare_cache.transfer import (
    Item,
    Part,
    Transfer,
    check_same_record,
    job_items,
    split_parts,
    verify_item,
)
from flare_core.geometry import PAGE_ALIGNMENT, Geometry, align_up
from flare_core.ports import PageMemory

__all__ = ["NUM_CONNECTIONS", "NUM_THREADS", "PART_BYTES", "PoolShelf", "staging_bytes"]

PART_BYTES = 8 << 20
PIECE_BYTES = 4 << 20
"""Of staging that is filled, digested and copied on at a time, while it is in a cache. Measured on 2 cores: smaller
pieces cost more in turns of the interpreter's lock than they save."""
NUM_CONNECTIONS = 4
NUM_THREADS = 6
"""Of the lane: while some verify, copy or wait for the manager's storage, the connections are not idle."""
_BUDGET_SHARE = 0.7
"""Of rank zero's deadline for a job: what is left pays for queues and for the answer."""
_LIMITS = ShardedLimits()
_NO_GRANT = Grant(transfer=b"", epoch=b"", num_bytes=0, header_digest=b"", seconds=0.0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Session:
    id: bytes
    client: PoolClient
    connections: BulkConnections


@dataclass(slots=True)
class PoolShelf:
    """See the module; a :class:`flare_cache.transfer.PoolPort` and a :class:`flare_cache.pool.agent.PoolSwitch`.

    Attributes:
        geometry, set_fingerprint, passage: as for the disk.
        source: where this rank's shards are put from.
        staging: buffers of ``staging_bytes``; one for each thread of the lane.
        num_connections: bulk connections at a time; more threads than that keep them busy while some verify, copy or
            wait for storage.
        clock: monotonic seconds.
    """

    geometry: Geometry
    set_fingerprint: bytes
    passage: Passage
    source: ShardSource
    staging: StagingBuffers
    num_connections: int = NUM_CONNECTIONS
    clock: Callable[[], float] = time.monotonic
    _session: _Session | None = None
    _reason: str = "the pool is not on yet"
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def turn_on(self, session: bytes, connection: PoolClient) -> None:
        """Take jobs of ``session``. Does not block."""
        assert len(session) == POOL_SESSION_BYTES  # noqa: S101 - the agreement's, checked there
        self._exchange(_Session(session, connection, BulkConnections(connection, self.num_connections)), "")

    def turn_off(self, reason: str) -> None:
        """Take none; what runs ends with its connections. Does not block."""
        self._exchange(None, reason)

    def _exchange(self, session: _Session | None, reason: str) -> None:
        with self._mutex:
            before, self._session, self._reason = self._session, session, reason
        if before is not None:
            before.connections.close()

    def fetch(self, job: Job, memory: PageMemory, *, since: float) -> Transfer:
        """Begin a fetch: have it granted, and read and check the shard's header."""
        layout = file_layout(job.record, page_bytes=self.geometry.page_bytes, row_stride=self.geometry.row_stride)
        items = job_items(job, layout, memory)
        deadline = since + _budget(sum(item.num_bytes for item in items))
        exchange = self._begin(job, deadline)
        message = GetStart(key=job.record.key, store_id=job.record.store_id, rank=self.geometry.rank)
        match exchange.ask(message):
            case Grant() as grant if grant.epoch == exchange.session.client.epoch:
                exchange.grant = grant
            case Grant():
                raise RecordError(Problem.MISSING, "the grant is of another epoch of the pool's manager")
            case Refused(reason=reason, detail=detail):
                raise RecordError(Problem.MISSING, f"the pool's manager: {reason}: {detail}")
            case other:
                raise PoolUnavailable(f"the pool's manager answers a get with {type(other).__name__}")
        try:
            header = self._header(exchange, layout.header_bytes)
            legal = layout.legal_size(exchange.grant.num_bytes)
            needed = max(item.offset + item.num_bytes for item in items)
            if legal is None or legal < needed:
                raise RecordError(
                    Problem.TRUNCATED, f"a shard of {exchange.grant.num_bytes} bytes where {needed} are needed"
                )
            check_same_record(header.identity, job.record)
        except BaseException as error:
            exchange.end(error)
            raise
        return _PoolFetch(self, exchange, header, split_parts(items, PART_BYTES))

    def put(self, job: Job, *, since: float) -> Transfer:
        """Begin a put: open the own shard, and have the transfer granted."""
        reader = self.source.open_shard(job)
        try:
            exchange = self._begin(job, since + _budget(reader.num_bytes))
            message = PutStart(
                record=job.record, extent=job.extent, rank=self.geometry.rank, num_bytes=reader.num_bytes
            )
            match exchange.ask(message):
                case Grant() as grant:
                    exchange.grant = grant
                case Refused(reason=RefusedReason.EXISTS):
                    reader.close()
                    return _AlreadyThere()
                case Refused(reason=reason, detail=detail):
                    raise OSError(f"pool-{reason}: {detail}")
                case other:
                    raise PoolUnavailable(f"the pool's manager answers a put with {type(other).__name__}")
        except BaseException:
            reader.close()
            raise
        return _PoolPut(self, exchange, reader, _ranges(reader.num_bytes))

    def _begin(self, job: Job, deadline: float) -> _Exchange:
        session = self._session
        if session is None or session.id != job.pool_session:
            raise RecordError(Problem.MISSING, self._reason or "the job is of another session of the pool")
        return _Exchange(session, job, deadline, self.clock, self.geometry.rank)

    def _header(self, exchange: _Exchange, num_bytes: int) -> RecordHeader:
        buffer = aligned_buffer(num_bytes)
        with exchange.session.connections.lend(exchange.deadline) as line:
            exchange.begin_get(line, offset=0, num_bytes=num_bytes)
            line.receive(buffer)
        expected = exchange.grant.header_digest
        if expected and bytes(buffer[-len(expected) :]) != expected:
            raise RecordError(Problem.HEADER_DIGEST, "the shard's header is not the one of its manifest")
        header = decode_header(buffer)
        check_header(header, set_fingerprint=self.set_fingerprint, geometry=self.geometry)
        return header


def staging_bytes(geometry: Geometry) -> int:
    """Bytes of one staging buffer: the largest part."""
    return align_up(max(PART_BYTES, geometry.page_bytes, geometry.row_stride), PAGE_ALIGNMENT)


def _land(line: TcpRange, targets: Iterable[memoryview], staging: memoryview) -> Iterator[memoryview]:
    """Receive what ``targets`` hold, piece by piece: each lands in staging, is copied on, and lent to be digested."""
    for target in targets:
        for at in range(0, len(target), len(staging)):
            goal = target[at : at + len(staging)]
            piece = staging[: len(goal)]
            line.receive(piece)
            copy_views([goal], [piece])
            yield piece


def _budget(num_bytes: int) -> float:
    limits = _LIMITS
    deadline = min(limits.max_job_seconds, limits.base_seconds + num_bytes / limits.floor_bytes_per_second)
    return _BUDGET_SHARE * deadline


def _ranges(num_bytes: int) -> list[Part]:
    """A shard in ranges for connections beside each other; no memory of pages is involved."""
    starts = itertools.count(0, PART_BYTES)
    return [
        [Item(number, number, start, min(PART_BYTES, num_bytes - start), ())]
        for number, start in zip(range(-(-num_bytes // PART_BYTES)), starts, strict=False)
    ]


@dataclass(slots=True)
class _Exchange:
    """One job's dealings with the manager."""

    session: _Session
    job: Job
    deadline: float
    clock: Callable[[], float]
    rank: int
    grant: Grant = _NO_GRANT

    def ask(self, message: Request) -> Reply:
        remaining = self.deadline - self.clock()
        if remaining <= 0:
            raise PoolUnavailable("the job's time with the pool is up")
        return self.session.client.request(message, timeout_seconds=remaining)

    def begin_get(self, line: TcpRange, *, offset: int, num_bytes: int) -> None:
        line.begin_get(self._key(), self.grant.transfer, offset=offset, num_bytes=num_bytes)

    def put(self, line: TcpRange, *, offset: int, view: memoryview) -> None:
        line.put(self._key(), self.grant.transfer, offset=offset, view=view)

    def _key(self) -> bytes:
        return self.session.client.transfer_key(self.grant.transfer)

    def end(self, error: BaseException | None = None) -> None:
        """Let the transfer go; a shard that is not what it should be is reported."""
        client, record = self.session.client, self.job.record
        client.request_later(Release(transfer=self.grant.transfer), lambda _: None, timeout_seconds=5.0)
        if isinstance(error, RecordError):
            report = ReportBad(key=record.key, store_id=record.store_id, rank=self.rank, detail=str(error)[:200])
            client.request_later(report, lambda _: None, timeout_seconds=5.0)


@dataclass(slots=True)
class _PoolFetch:
    """A begun fetch; see :class:`flare_cache.transfer.Transfer`."""

    shelf: PoolShelf
    exchange: _Exchange
    header: RecordHeader
    parts: Sequence[Part]
    _bad: RecordError | None = None

    def run(self, part: Part) -> None:
        """Receive, verify and deliver one part."""
        shelf, exchange = self.shelf, self.exchange
        try:
            with shelf.passage.incoming([item.segments for item in part]) as window:
                with exchange.session.connections.lend(exchange.deadline) as line:
                    self._receive(part, window, line)
                window.deliver()
        except RecordError as error:
            self._bad = error
            raise

    def _receive(self, part: Part, window: Window, line: TcpRange) -> None:
        """Fill the window, by way of staging, and verify what it holds."""
        shelf, exchange = self.shelf, self.exchange
        buffer = shelf.staging.take(exchange.deadline)
        state = BufferState.QUIET
        try:
            exchange.begin_get(line, offset=part[0].offset, num_bytes=sum(item.num_bytes for item in part))
            for item, views in zip(part, window.sections, strict=True):
                pieces = _land(line, views, buffer[:PIECE_BYTES])
                verify_item(item, pieces, header=self.header, geometry=shelf.geometry)
        except BaseException:
            state = line.cancel()
            raise
        finally:
            shelf.staging.give_back(buffer, state)

    def finish(self) -> int:
        """The session must have lasted: what was granted in it is what was read. Bytes moved."""
        if not self.exchange.session.client.is_open:
            raise RecordError(Problem.MISSING, "the pool's session ended during the transfer")
        self.exchange.end()
        return sum(item.num_bytes for part in self.parts for item in part)

    def abandon(self) -> bool:
        """Nothing is left behind: pages belong to a job that has failed."""
        self.exchange.end(self._bad)
        return True


@dataclass(slots=True)
class _PoolPut:
    """A begun put; see :class:`flare_cache.transfer.Transfer`."""

    shelf: PoolShelf
    exchange: _Exchange
    reader: ShardReader
    parts: Sequence[Part]

    def run(self, part: Part) -> None:
        """Read one range of the own shard and send it."""
        item = part[0]
        buffer = self.shelf.staging.take(self.exchange.deadline)
        state = BufferState.QUIET
        try:
            view = self.reader.read(item.offset, item.num_bytes, buffer)
            with self.exchange.session.connections.lend(self.exchange.deadline) as line:
                try:
                    self.exchange.put(line, offset=item.offset, view=view)
                except BaseException:
                    state = line.cancel()
                    raise
        finally:
            self.shelf.staging.give_back(buffer, state)

    def finish(self) -> int:
        """Wait until the manager has verified the shard and made it durable; its size."""
        match self.exchange.ask(PutFinish(transfer=self.exchange.grant.transfer)):
            case Done():
                self.reader.close()
                return self.reader.num_bytes
            case Refused(reason=RefusedReason.EXISTS):
                self.reader.close()
                return 0
            case Refused(reason=reason, detail=detail):
                raise OSError(f"pool-{reason}: {detail}")
            case other:
                raise PoolUnavailable(f"the pool's manager answers the end of a put with {type(other).__name__}")

    def abandon(self) -> bool:
        """The manager forgets what it has of it."""
        with contextlib.suppress(OSError):
            self.reader.close()
        self.exchange.end()
        return True


@dataclass(frozen=True, slots=True)
class _AlreadyThere:
    """A put of what the pool has."""

    parts: Sequence[Part] = ((),)

    def run(self, part: Part) -> None:
        """Nothing is to be sent."""

    def finish(self) -> int:
        """No bytes were moved."""
        return 0

    def abandon(self) -> bool:
        """Nothing was begun."""
        return True
