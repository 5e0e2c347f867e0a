"""A pool in this process, for tests: what a manager would hold, and connections to it that a test can break.

It is lenient where a manager is strict: it verifies nothing and finds more than was asked for. Nothing of flare's
serving uses this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flare_cache.jobs import Job
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.pool.agent import PoolConnection
from flare_cache.pool.agreement import AgreementTimes
from flare_cache.pool.manifest import Manifest, Shard
from flare_cache.pool.messages import (
    Commit,
    Committed,
    Find,
    Found,
    Has,
    Presence,
    Refused,
    RefusedReason,
    Reply,
    Request,
)
from flare_cache.pool.setup import PoolSetup
from flare_cache.record import Problem, RecordError
from flare_cache.transfer import Part, Shelf, Transfer
from flare_core.ports import PageMemory

__all__ = ["ScriptedPool"]

QUICK = AgreementTimes(vote_seconds=5.0, least_pause=0.01, early_pause=0.02, late_pause=0.02)
PENDING_BYTES = 1 << 20
_KEY_BYTES = 32


@dataclass(slots=True)
class _OnePart:
    """A transfer that is one call."""

    work: Callable[[], int]
    num_bytes: int = 0

    @property
    def parts(self) -> Sequence[Part]:
        """One, of nothing."""
        return [[]]

    def run(self, part: Part) -> None:
        """Do it."""
        self.num_bytes = self.work() + len(part)

    def finish(self) -> int:
        """Bytes moved."""
        return self.num_bytes

    def abandon(self) -> bool:
        """Nothing to undo."""
        return True


@dataclass(slots=True, eq=False)
class _Connection:
    """A registered connection."""

    pool: ScriptedPool
    on_lost: Callable[[str], None]
    epoch: bytes
    manager: str = "scripted"

    def request_later(
        self, request: Request, on_reply: Callable[[Reply | None], None], *, timeout_seconds: float
    ) -> None:
        """Answered at once, if at all."""
        del timeout_seconds
        if self.pool.silent is None or not isinstance(request, self.pool.silent):
            on_reply(self.pool.answer(request))

    def close(self) -> None:
        """Leave the pool."""
        if self in self.pool.connections:
            self.pool.connections.remove(self)


@dataclass(slots=True)
class ScriptedPool:
    """The manager.

    Attributes:
        manifests, shards: what it holds; a shard is a memory shelf's record, by key and rank.
        epoch: of its process. is_up: whether it answers.
        refuses: why it takes no connection of a rank.
        silent: a kind of request that is never answered. refusals: answers to the next commits.
        asked: every request. num_puts: shards that were put.
    """

    manifests: dict[bytes, Manifest] = field(default_factory=dict)
    shards: dict[tuple[bytes, int], object] = field(default_factory=dict)
    epoch: bytes = bytes(16)
    is_up: bool = True
    refuses: dict[int, str] = field(default_factory=dict)
    silent: type[Request] | None = None
    refusals: list[Refused] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    num_puts: int = 0
    connections: list[_Connection] = field(default_factory=list)

    def stop(self) -> None:
        """Die, with every connection."""
        self.is_up = False
        for connection in list(self.connections):
            connection.close()
            threading.Thread(target=connection.on_lost, args=("the manager is gone",)).start()

    def start(self) -> None:
        """Live again, as another process."""
        self.epoch = bytes([self.epoch[0] + 1]) * 16
        self.is_up = True

    def for_rank(self, rank: int, source: Shelf) -> tuple[PoolSetup, _ScriptedShelf]:
        """What a rank brings, which puts from ``source``, a memory shelf."""
        if not isinstance(source, MemoryShelf):
            raise TypeError(f"{source} is no memory shelf")
        shelf = _ScriptedShelf(self, rank, source)
        setup = PoolSetup(
            open_connection=lambda _, __, on_lost: self._connect(rank, on_lost),
            num_addresses=1,
            settings=bytes(32),
            shelf=shelf,
            pending_bytes=PENDING_BYTES,
            times=QUICK,
        )
        return setup, shelf

    def answer(self, request: Request) -> Reply | None:
        """What the manager says."""
        self.asked.append(request)
        if not self.is_up:
            return None
        match request:
            case Has(keys=keys):
                return Presence(present=bytes(key in self.manifests for key in _split(keys)))
            case Commit():
                return self.refusals.pop(0) if self.refusals else self._commit(request)
            case Find(keys=keys):
                wanted = set(_split(keys))
                found = [
                    one
                    for one in self.manifests.values()
                    if one.record.start_key in wanted or one.record.key in wanted or one.record.start == 0
                ]
                return Found(manifests=tuple(found), num_pages=len(wanted))
            case _:
                return Refused(reason=RefusedReason.MALFORMED)

    def _commit(self, request: Commit) -> Committed:
        record = request.record
        ranks = sorted(rank for key, rank in self.shards if key == record.key)
        manifest = Manifest(
            record=record,
            extent=request.extent,
            token_ids=request.token_ids,
            shards=tuple(Shard(4096, bytes(_KEY_BYTES)) for _ in ranks),
            created_at=0.0,
        )
        return Committed(store_id=self.manifests.setdefault(record.key, manifest).record.store_id)

    def _connect(self, rank: int, on_lost: Callable[[str], None]) -> PoolConnection:
        if not self.is_up:
            raise ConnectionRefusedError("connection refused")
        if rank in self.refuses:
            raise OSError(self.refuses[rank])
        self.connections.append(_Connection(self, on_lost, self.epoch))
        return self.connections[-1]


@dataclass(slots=True)
class _ScriptedShelf:
    """A rank's shards: its memory shelf's records, kept in the pool as they are."""

    pool: ScriptedPool
    rank: int
    source: MemoryShelf
    session: bytes = b""

    def turn_on(self, session: bytes, connection: PoolConnection) -> None:
        """See the port."""
        del connection
        self.session = session

    def turn_off(self, reason: str) -> None:
        """See the port."""
        del reason
        self.session = b""

    def put(self, job: Job, *, since: float) -> Transfer:
        """See the port."""
        del since
        return _OnePart(lambda: self._put(job))

    def fetch(self, job: Job, memory: PageMemory, *, since: float) -> Transfer:
        """See the port."""
        del since
        self._check(job)
        record = self.pool.shards.get((job.record.key, self.rank))
        if record is None:
            raise RecordError(Problem.MISSING, job.record.key.hex()[:16])
        shelf = MemoryShelf(self.source.geometry, self.source.set_fingerprint, self.source.passage, 0)
        shelf._records[job.record.key] = record  # type: ignore[assignment]
        return shelf.fetch(job, memory)

    def _put(self, job: Job) -> int:
        self._check(job)
        record = self.source._find(job)
        self.pool.shards[job.record.key, self.rank] = record
        self.pool.num_puts += 1
        return record.size

    def _check(self, job: Job) -> None:
        if job.pool_session != self.session:
            raise RecordError(Problem.MISSING, "another session")
        if not self.pool.is_up:
            raise TimeoutError("the manager does not answer")


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES)]
