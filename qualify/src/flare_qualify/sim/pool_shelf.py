"""A rank's transfers from and to the simulated pool: part by part, so that anything can happen in between.

Stands in for the shell that does the same over sockets, and keeps its promises: a session is checked, bytes land in
staging and are verified before they reach a page, and a job ends within its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flare_cache.host_memory import aligned_buffer
from flare_cache.jobs import Job
from flare_cache.pool.agent import PoolConnection
from flare_cache.pool.messages import (
    Done,
    GetStart,
    Grant,
    PutFinish,
    PutStart,
    Refused,
    RefusedReason,
    Release,
    ReportBad,
)
from flare_cache.pool.shard_source import ShardReader, ShardSource
from flare_cache.record import Problem, RecordError, RecordHeader, check_header, decode_header, file_layout
from flare_cache.transfer import (
    Part,
    Transfer,
    check_same_record,
    flat_views,
    job_items,
    split_parts,
    verify_items,
)
from flare_core.geometry import Geometry
from flare_core.ports import PageMemory
from flare_qualify.sim.memory import SimPassage
from flare_qualify.sim.pool_manager import SimConnection, SimManager

__all__ = ["SimPoolShelf"]

BUDGET_SECONDS = 3.5
"""0.7 of the least deadline that rank zero sets."""
_PUT_PARTS = 2
_ALIGNMENT = 4096
_DIGEST_BYTES = 32


@dataclass(slots=True)
class SimPoolShelf:
    """See the module. ``on_switch`` is told the session that this rank is in from now on, or None."""

    pool: SimManager
    rank: int
    geometry: Geometry
    passage: SimPassage
    source: ShardSource
    clock: Callable[[], float]
    part_bytes: int
    on_switch: Callable[[int, bytes | None], None]
    session: bytes | None = None
    connection: SimConnection | None = None

    def turn_on(self, session: bytes, connection: PoolConnection) -> None:
        """Take jobs of ``session``."""
        if not isinstance(connection, SimConnection):
            raise TypeError(f"{connection} is not simulated")
        self.session, self.connection = session, connection
        self.on_switch(self.rank, session)

    def turn_off(self, reason: str) -> None:
        """Take none."""
        del reason
        self.session = self.connection = None
        self.on_switch(self.rank, None)

    def fetch(self, job: Job, memory: PageMemory, *, since: float) -> Transfer:
        """See ``PoolPort``."""
        connection = self._connection(job, since)
        record = job.record
        reply = connection.ask(GetStart(key=record.key, store_id=record.store_id, rank=self.rank))
        if not isinstance(reply, Grant):
            raise RecordError(Problem.MISSING, str(reply))
        exchange = _Exchange(self, connection, since, job, reply)
        try:
            header = self._header(exchange)
            parts = split_parts(job_items(job, header.layout, memory), self.part_bytes)
            if parts[-1][-1].offset + parts[-1][-1].num_bytes > reply.num_bytes:
                raise RecordError(Problem.TRUNCATED, "the shard ends before")
        except BaseException as error:
            exchange.end(error)
            raise
        return _Fetch(exchange, header, parts)

    def _header(self, exchange: _Exchange) -> RecordHeader:
        layout = file_layout(
            exchange.job.record, page_bytes=self.geometry.page_bytes, row_stride=self.geometry.row_stride
        )
        data = exchange.read(0, layout.header_bytes)
        if bytes(data[-_DIGEST_BYTES:]) != exchange.grant.header_digest:
            raise RecordError(Problem.HEADER_DIGEST, "the shard's header is not the one of its manifest")
        header = decode_header(data)
        check_header(header, set_fingerprint=self.pool.identity.fingerprint(), geometry=self.geometry)
        check_same_record(header.identity, exchange.job.record)
        return header

    def put(self, job: Job, *, since: float) -> Transfer:
        """See ``PoolPort``."""
        connection = self._connection(job, since)
        reader = self.source.open_shard(job)
        try:
            reply = connection.ask(
                PutStart(record=job.record, extent=job.extent, rank=self.rank, num_bytes=reader.num_bytes)
            )
        except BaseException:
            reader.close()
            raise
        if isinstance(reply, Grant):
            return _Put(_Exchange(self, connection, since, job, reply), reader)
        reader.close()
        if isinstance(reply, Refused) and reply.reason is RefusedReason.EXISTS:
            return _Nothing()
        raise OSError(str(reply))

    def _connection(self, job: Job, since: float) -> SimConnection:
        if job.pool_session != self.session or self.connection is None:
            raise RecordError(Problem.MISSING, "another session")
        if self.clock() - since > BUDGET_SECONDS:
            raise TimeoutError("the pool is too slow")
        return self.connection


@dataclass(slots=True)
class _Exchange:
    """One job's dealings with the manager."""

    shelf: SimPoolShelf
    connection: SimConnection
    since: float
    job: Job
    grant: Grant

    def check(self) -> str:
        """The connection carries, the grant holds, and there is time left; the object's name. Raises OSError."""
        transfer = self.shelf.pool.transfer(self.connection, self.grant.transfer)
        if not self.connection.is_open or transfer is None:
            raise ConnectionResetError("the connection to the pool broke, or the transfer is over")
        if self.shelf.clock() - self.since > BUDGET_SECONDS:
            raise TimeoutError("the pool is too slow")
        return transfer.name

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Some of the shard. Raises OSError."""
        view = memoryview(bytearray(num_bytes))
        self.shelf.pool.storage.read(self.check(), offset, view)
        return view

    def end(self, error: BaseException | None = None) -> None:
        """Let the transfer go; a shard that is not what it should be is reported."""
        connection, record = self.connection, self.job.record
        connection.request_later(Release(transfer=self.grant.transfer), lambda _: None, timeout_seconds=5.0)
        if isinstance(error, RecordError):
            report = ReportBad(key=record.key, store_id=record.store_id, rank=self.shelf.rank, detail=str(error))
            connection.request_later(report, lambda _: None, timeout_seconds=5.0)


@dataclass(slots=True)
class _Nothing:
    """The pool has it already."""

    parts: Sequence[Part] = ((),)

    def run(self, part: Part) -> None:
        del part

    def finish(self) -> int:
        return 0

    def abandon(self) -> bool:
        return True


@dataclass(slots=True)
class _Fetch:
    exchange: _Exchange
    header: RecordHeader
    parts: Sequence[Part]
    bad: RecordError | None = None

    def run(self, part: Part) -> None:
        shelf = self.exchange.shelf
        data = self.exchange.read(part[0].offset, sum(item.num_bytes for item in part))
        with shelf.passage.incoming([item.segments for item in part]) as window:
            at = 0
            for view in flat_views(window):
                view[:] = data[at : at + len(view)]
                at += len(view)
            try:
                verify_items(part, window, header=self.header, geometry=shelf.geometry)
            except RecordError as error:
                self.bad = error
                raise
            window.deliver()

    def finish(self) -> int:
        self.exchange.check()
        self.exchange.end()
        return sum(item.num_bytes for part in self.parts for item in part)

    def abandon(self) -> bool:
        self.exchange.end(self.bad)
        return True


@dataclass(slots=True)
class _Put:
    exchange: _Exchange
    reader: ShardReader
    sent: bytearray = field(default_factory=bytearray)
    parts: Sequence[Part] = ((),) * _PUT_PARTS

    def run(self, part: Part) -> None:
        """About half of what is left, or all of it."""
        del part
        self.exchange.check()
        left = self.reader.num_bytes - len(self.sent)
        size = left if self.sent else max(_ALIGNMENT, left // _PUT_PARTS // _ALIGNMENT * _ALIGNMENT)
        if size:
            self.sent += self.reader.read(len(self.sent), size, aligned_buffer(size))

    def finish(self) -> int:
        exchange = self.exchange
        pool = exchange.shelf.pool
        exchange.check()
        transfer = pool.transfer(exchange.connection, exchange.grant.transfer)
        if transfer is not None:
            transfer.num_received = len(self.sent)
            pool.received[transfer.id] = bytes(self.sent)
        reply = exchange.connection.ask(PutFinish(transfer=exchange.grant.transfer))
        if not isinstance(reply, Done):
            raise OSError(str(reply))
        self.reader.close()
        return len(self.sent)

    def abandon(self) -> bool:
        self.reader.close()
        self.exchange.end()
        return True
