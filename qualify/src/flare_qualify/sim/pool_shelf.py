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
from flare_cache.pool.shard_source import ShardReader, ShardSource
from flare_cache.record import Problem, RecordError, RecordHeader
from flare_cache.transfer import Part, Transfer, job_items, split_parts, verify_items
from flare_core.geometry import Geometry
from flare_core.ports import PageMemory
from flare_qualify.sim.memory import SimPassage
from flare_qualify.sim.pool_manager import SimConnection, SimManager

__all__ = ["SimPoolShelf"]

BUDGET_SECONDS = 3.5
"""0.7 of the least deadline that rank zero sets."""
_PUT_PARTS = 2
_ALIGNMENT = 4096


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
        connection = self._connection(job)
        manifest = self.pool.manifest(job.record.key)
        if manifest is None or manifest.record != job.record:
            raise RecordError(Problem.MISSING, job.record.key.hex()[:16])
        header = self.pool.shard_header(job.record, self.rank)
        data = self.pool.objects.get(self.pool.name_of(job.record, self.rank))
        if header is None or data is None:
            raise RecordError(Problem.MISSING, "the shard cannot be read")
        items = job_items(job, header.layout, memory)
        parts = split_parts(items, self.part_bytes)
        if parts and parts[-1][-1].offset + parts[-1][-1].num_bytes > len(data):
            raise RecordError(Problem.TRUNCATED, "the shard ends before")
        return _Fetch(self, connection, since, header, data, parts)

    def put(self, job: Job, *, since: float) -> Transfer:
        """See ``PoolPort``."""
        connection = self._connection(job)
        manifest = self.pool.manifest(job.record.key)
        if manifest is not None:
            return _Nothing()
        return _Put(self, connection, since, job, self.source.open_shard(job))

    def _connection(self, job: Job) -> SimConnection:
        if job.pool_session != self.session or self.connection is None:
            raise RecordError(Problem.MISSING, "another session")
        self.check(self.connection, self.clock())
        return self.connection

    def check(self, connection: SimConnection, since: float) -> None:
        """The connection still carries, and there is time left. Raises OSError."""
        if not connection.is_open or connection.epoch != self.pool.epoch:
            raise ConnectionResetError("the connection to the pool broke")
        if self.clock() - since > BUDGET_SECONDS:
            raise TimeoutError("the pool is too slow")


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
    shelf: SimPoolShelf
    connection: SimConnection
    since: float
    header: RecordHeader
    data: bytes
    parts: Sequence[Part]
    num_bytes: int = 0

    def run(self, part: Part) -> None:
        shelf = self.shelf
        shelf.check(self.connection, self.since)
        with shelf.passage.incoming([item.segments for item in part]) as window:
            for item, views in zip(part, window.sections, strict=True):
                at = item.offset
                for view in views:
                    view[:] = self.data[at : at + len(view)]
                    at += len(view)
            verify_items(part, window, header=self.header, geometry=shelf.geometry)
            window.deliver()
        self.num_bytes += sum(item.num_bytes for item in part)

    def finish(self) -> int:
        return self.num_bytes

    def abandon(self) -> bool:
        return True


@dataclass(slots=True)
class _Put:
    shelf: SimPoolShelf
    connection: SimConnection
    since: float
    job: Job
    reader: ShardReader
    sent: bytearray = field(default_factory=bytearray)
    parts: Sequence[Part] = ((),) * _PUT_PARTS

    def run(self, part: Part) -> None:
        """About half of what is left, or all of it."""
        del part
        self.shelf.check(self.connection, self.since)
        left = self.reader.num_bytes - len(self.sent)
        size = left if self.sent else max(_ALIGNMENT, left // _PUT_PARTS // _ALIGNMENT * _ALIGNMENT)
        if size:
            buffer = memoryview(aligned_buffer(size))[:size]
            self.reader.read_into(len(self.sent), buffer)
            self.sent += buffer

    def finish(self) -> int:
        self.shelf.check(self.connection, self.since)
        if self.shelf.pool.is_full:
            raise OSError("the pool is full")
        self.shelf.pool.put(self.job.record, self.job.extent, self.shelf.rank, bytes(self.sent))
        self.reader.close()
        return len(self.sent)

    def abandon(self) -> bool:
        self.reader.close()
        return True
