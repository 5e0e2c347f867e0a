"""The pool's manager in a simulated world: storage that lasts, a process over it that dies, and connections to it.

Written from the contract (``flare_cache.pool.manifest``, ``messages``), so that the ranks' machines are held against
it and not against themselves. What ranks do with it is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.manifest import Manifest, Shard, decode_manifest, encode_manifest, manifest_name, shard_name
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
from flare_cache.pool.shard_source import extent_bytes
from flare_cache.record import RecordError, RecordHeader, check_header, decode_header
from flare_core.geometry import SetIdentity
from flare_core.keys import packed_chain_keys
from flare_qualify.sim.links import After
from flare_qualify.sim.loop import EventLoop
from flare_qualify.sim.records import section_problem

__all__ = ["SimConnection", "SimManager"]

_KEY_BYTES = 32
_GRACE_SECONDS = 5.0
_NAMESPACE = bytes(32)


@dataclass(slots=True, eq=False)
class SimConnection:
    """One rank's registered connection; ``after`` schedules in that rank's process."""

    pool: SimManager
    rank: int
    session: bytes
    epoch: bytes
    after: After
    on_lost: Callable[[str], None]
    manager: str = "simulated"
    is_open: bool = True

    def request_later(
        self, request: Request, on_reply: Callable[[Reply | None], None], *, timeout_seconds: float
    ) -> None:
        """Answered once: by the manager, or by the clock."""
        waiting = [on_reply]

        def answer(reply: Reply | None) -> None:
            if waiting:
                waiting.pop()(reply)

        def arrive() -> None:
            if self.is_open:
                reply = self.pool.answer(request)
                self.after(self.pool.trip(), "the pool answers", lambda: answer(reply))

        if not self.is_open:
            self.after(0.0, "the pool is gone", lambda: answer(None))
            return
        self.pool.loop.after(self.pool.trip(), "the pool is asked", arrive)
        self.after(timeout_seconds, "the pool is late", lambda: answer(None))

    def close(self) -> None:
        """This side ends it."""
        self.is_open = False
        if self in self.pool.connections:
            self.pool.connections.remove(self)

    def lose(self, reason: str, *, seconds: float) -> None:
        """It breaks, and this rank learns of it some time later."""
        self.close()
        self.after(seconds, "the pool is lost", lambda: self.on_lost(reason))


@dataclass(slots=True)
class SimManager:
    """See the module.

    Attributes:
        objects: what the storage holds, by name.
        damaged: names of objects that were changed behind the manager's back.
        refusing: ranks whose next connection is refused.
        registered: by session, the epoch of the manager that each rank registered with.
        slowness: factor of every delay. is_full: it takes no shard.
        is_dying: it dies when the next rank has registered, and another process takes its place at once.
        committed: keys of all that has ever been visible.
    """

    loop: EventLoop
    rng: Random
    identity: SetIdentity
    latency_seconds: float
    counts: Counter[str]
    objects: dict[str, bytes] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    refusing: set[int] = field(default_factory=set)
    connections: list[SimConnection] = field(default_factory=list)
    registered: dict[bytes, dict[int, bytes]] = field(default_factory=dict)
    committed: set[bytes] = field(default_factory=set)
    slowness: float = 1.0
    is_full: bool = False
    is_up: bool = True
    is_dying: bool = False
    epoch: bytes = b""
    _index: dict[bytes, Manifest] = field(default_factory=dict)
    _by_page: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.epoch = self.rng.randbytes(16)

    def trip(self) -> float:
        """Seconds that a message takes."""
        return self.latency_seconds * (0.5 + self.rng.random()) * self.slowness

    # -- the process -----------------------------------------------------------------------------------------------

    def connect(self, rank: int, session: bytes, *, after: After, on_lost: Callable[[str], None]) -> SimConnection:
        """A rank registers. Raises OSError."""
        if not self.is_up:
            raise ConnectionRefusedError("connection refused")
        if rank in self.refusing:
            self.refusing.discard(rank)
            raise PermissionError("the staging cannot be registered")
        connection = SimConnection(self, rank, session, self.epoch, after, on_lost)
        self.connections.append(connection)
        self.registered.setdefault(session, {})[rank] = self.epoch
        if self.is_dying:
            self.is_dying = False
            self.loop.after(0.0, "the pool dies of a registration", lambda: self.crash(notice_seconds=3.0))
            self.loop.after(self.latency_seconds / 10, "the pool is back", self.start)
        return connection

    def crash(self, *, notice_seconds: float = 0.2) -> None:
        """The process dies; what it had stored stays, and each rank learns of it when it does."""
        self.is_up = False
        self._index.clear()
        self._by_page.clear()
        for connection in list(self.connections):
            connection.lose("the manager is gone", seconds=self.trip() + notice_seconds * self.rng.random())

    def start(self) -> None:
        """Another process over the same storage."""
        if not self.is_up:
            self.is_up, self.epoch = True, self.rng.randbytes(16)
            for name, data in sorted(self.objects.items()):
                if "/manifests/" in name:
                    self._learn(decode_manifest(data))

    # -- requests --------------------------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        """Everything visible, as the storage has it."""
        return [decode_manifest(data) for name, data in sorted(self.objects.items()) if "/manifests/" in name]

    def manifest(self, key: bytes) -> Manifest | None:
        """Of a visible record."""
        return self._index.get(key)

    def answer(self, request: Request) -> Reply:
        """What the manager says."""
        match request:
            case Has(keys=keys):
                return Presence(present=bytes(key in self._index for key in _split(keys)))
            case Find(keys=keys):
                return self._find(_split(keys))
            case Commit():
                return self.commit(request)
            case _:
                return Refused(reason=RefusedReason.MALFORMED)

    def _find(self, keys: list[bytes]) -> Found:
        found: dict[bytes, Manifest] = {}
        matched = 0
        for key in keys:
            name = self._by_page.get(key)
            if name is None:
                break
            found[name] = self._index[name]
            matched += 1
        ends = {keys[matched - 1]} if matched else set()
        near = (one for one in self._index.values() if one.record.start_key in ends or one.record.start == 0)
        found |= {one.record.key: one for one in near}
        return Found(manifests=tuple(found.values()), num_pages=matched)

    def commit(self, request: Commit) -> Reply:
        """Make a record visible, if every shard is in."""
        record = request.record
        visible = self._index.get(record.key)
        if visible is not None:
            return Committed(store_id=visible.record.store_id)
        shards: list[Shard] = []
        for rank in range(len(self.identity.geometries)):
            header = self.shard_header(record, rank)
            data = self.objects.get(shard_name(_NAMESPACE, record.key, record.store_id, rank), b"")
            if header is None or len(data) != extent_bytes(header.layout, request.extent):
                return Refused(reason=RefusedReason.INCOMPLETE, detail=f"rank {rank}")
            shards.append(Shard(len(data), bytes(32)))
        manifest = Manifest(
            record=record, extent=request.extent, token_ids=request.token_ids, shards=tuple(shards), created_at=0.0
        )
        self.objects[manifest_name(_NAMESPACE, record.key)] = encode_manifest(manifest)
        self._learn(manifest)
        self.counts["committed"] += 1
        return Committed(store_id=record.store_id)

    def _learn(self, manifest: Manifest) -> None:
        record = manifest.record
        self._index[record.key] = manifest
        self.committed.add(record.key)
        for key in packed_chain_keys(record.start_key, manifest.token_ids, record.page_tokens):
            self._by_page.setdefault(key, record.key)

    def evict(self, key: bytes) -> None:
        """Drop a record: the manifest now, the shards after a grace."""
        manifest = self._index.pop(key, None)
        if manifest is None:
            return
        self._by_page = {page: record for page, record in self._by_page.items() if record != key}
        self.objects.pop(manifest_name(_NAMESPACE, key), None)
        self.damaged.discard(manifest_name(_NAMESPACE, key))
        names = [self.name_of(manifest.record, rank) for rank in range(len(manifest.shards))]
        self.loop.after(_GRACE_SECONDS, "the pool forgets shards", lambda: self._forget(manifest.record, names))

    def _forget(self, record: RecordIdentity, names: list[str]) -> None:
        visible = self._index.get(record.key)
        if visible is None or visible.record.store_id != record.store_id:
            for name in names:
                self.objects.pop(name, None)
                self.damaged.discard(name)

    # -- shards ----------------------------------------------------------------------------------------------------

    def name_of(self, record: RecordIdentity, rank: int) -> str:
        """Of a shard."""
        return shard_name(_NAMESPACE, record.key, record.store_id, rank)

    def shard_header(self, record: RecordIdentity, rank: int) -> RecordHeader | None:
        """The header of a shard, if there is one and it is that record's."""
        data = self.objects.get(self.name_of(record, rank))
        header = None if data is None else self.header_in(data, rank)
        return header if header is not None and header.identity == record else None

    def header_in(self, data: bytes, rank: int) -> RecordHeader | None:
        """The header that begins a shard's bytes, if it is sound."""
        try:
            header = decode_header(memoryview(data))
            check_header(header, set_fingerprint=self.identity.fingerprint(), geometry=self.identity.geometries[rank])
        except RecordError:
            return None
        return header

    def put(self, record: RecordIdentity, extent: Extent, rank: int, data: bytes) -> None:
        """Verify a shard and keep it. Raises OSError."""
        problem = self.shard_problem(record, extent, rank, data)
        if problem is not None:
            raise OSError(problem)
        self.objects[self.name_of(record, rank)] = data
        self.counts["shards put"] += 1

    def shard_problem(self, record: RecordIdentity, extent: Extent, rank: int, data: bytes) -> str | None:
        """What is wrong with a shard's bytes; None: nothing."""
        header = self.header_in(data, rank)
        if header is None or header.identity != record:
            return "the shard's header is not this record's"
        if len(data) != extent_bytes(header.layout, extent):
            return f"the shard has {len(data)} bytes, which is not its {extent}"
        return section_problem(header, memoryview(data), rank)


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES)]
