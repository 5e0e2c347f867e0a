"""The pool's manager in a simulated world: its real core and its storage work, a process that dies, and connections.

What storage does are events of their own, so that the process can die between any two of them. What ranks do with the
pool is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from flare_cache.pool.core import PoolCore
from flare_cache.pool.core_words import (
    Answer,
    CheckShard,
    CoreEffect,
    DeleteObjects,
    LandShard,
    PoolLimits,
    PutManifest,
    Transfer,
)
from flare_cache.pool.landings import shard_check
from flare_cache.pool.memory_tier import MemoryTier
from flare_cache.pool.messages import POOL_PROTOCOL, Refused, Register, Registered, Reply, Request
from flare_cache.pool.storage_work import check_stored_shard, delete_objects, land_shard, put_manifest
from flare_core.geometry import SetIdentity
from flare_qualify.sim.links import After
from flare_qualify.sim.loop import EventLoop, Violation
from flare_qualify.sim.pool_storage import SimStorage

__all__ = ["GRACE_SECONDS", "NAMESPACE", "SimConnection", "SimManager"]

NAMESPACE = bytes(32)
GRACE_SECONDS = 3.0
_TRANSFER_SECONDS = 2.5
_TICK_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class SimConnection:
    """One rank's registered connection; ``after`` schedules in that rank's process. ``id`` is the link's session."""

    pool: SimManager
    id: bytes
    epoch: bytes
    after: After
    on_lost: Callable[[str], None]
    manager: str = "simulated"
    is_open: bool = True
    num_requests: int = 0

    def request_later(
        self, request: Request, on_reply: Callable[[Reply | None], None], *, timeout_seconds: float
    ) -> None:
        """Answered once: by the manager, or by the clock."""
        waiting = [on_reply]

        def answer(reply: Reply | None) -> None:
            if waiting:
                waiting.pop()(reply)

        def come_back(reply: Reply) -> None:
            self.after(self.pool.trip(), "the pool answers", lambda: answer(reply))

        def arrive() -> None:
            if self.is_open:
                self.pool.request(self, request, come_back)

        if not self.is_open:
            self.after(0.0, "the pool is gone", lambda: answer(None))
            return
        self.pool.loop.after(self.pool.trip(), "the pool is asked", arrive)
        self.after(timeout_seconds, "the pool is late", lambda: answer(None))

    def ask(self, request: Request) -> Reply:
        """Ask within one event, storage work included. Raises OSError."""
        if not self.is_open:
            raise ConnectionResetError("the connection to the pool broke")
        found: list[Reply] = []
        self.pool.request(self, request, found.append, is_at_once=True)
        if not found:
            raise Violation("the pool answers", f"{type(request).__name__} was not answered")
        return found[0]

    def close(self) -> None:
        """This side ends it."""
        if self.is_open:
            self.is_open = False
            self.pool.ended(self)

    def lose(self, reason: str, *, seconds: float) -> None:
        """It breaks, and this rank learns of it some time later."""
        self.close()
        self.after(seconds, "the pool is lost", lambda: self.on_lost(reason))


@dataclass(slots=True)
class SimManager:
    """See the module.

    Attributes:
        limit_bytes: of everything visible; None: none.
        refusing: ranks whose next connection is refused.
        registered: by session of the ranks, the epoch of the manager that each rank registered with.
        received: bytes of puts, by transfer.
        slowness: factor of every delay.
        dying_of: it dies of the next request of this kind, done or not, and another process soon takes its place.
    """

    loop: EventLoop
    rng: Random
    identity: SetIdentity
    latency_seconds: float
    counts: Counter[str]
    limit_bytes: int | None = None
    storage: SimStorage = field(default_factory=SimStorage)
    refusing: set[int] = field(default_factory=set)
    connections: list[SimConnection] = field(default_factory=list)
    registered: dict[bytes, dict[int, bytes]] = field(default_factory=dict)
    received: dict[bytes, bytes] = field(default_factory=dict)
    slowness: float = 1.0
    is_up: bool = False
    dying_of: type[Request] | None = None
    epoch: bytes = b""
    _core: PoolCore | None = None
    _waiting: dict[tuple[bytes, int], Callable[[Reply], None]] = field(default_factory=dict)
    _is_at_once: bool = False
    _ordered_until: float = 0.0

    def trip(self) -> float:
        """Seconds that a message takes."""
        return self.latency_seconds * (0.5 + self.rng.random()) * self.slowness

    # -- the process -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A process over the storage, unless there is one."""
        if self.is_up:
            return
        self.is_up, self.epoch = True, self.rng.randbytes(16)
        limits = PoolLimits(
            limit_bytes=self.limit_bytes, transfer_seconds=_TRANSFER_SECONDS, grace_seconds=GRACE_SECONDS
        )
        core = PoolCore(epoch=self.epoch, name="simulated", limits=limits, draw_transfer=lambda: self.rng.randbytes(16))
        core.adopt(NAMESPACE, self.storage.manifests())
        self._core = core
        self._tick(core)

    def crash(self, *, notice_seconds: float = 0.2) -> None:
        """The process dies; what it had stored stays, and each rank learns of it when it does."""
        self.is_up, self._core = False, None
        self._waiting.clear()
        self.received.clear()
        for connection in list(self.connections):
            connection.lose("the manager is gone", seconds=self.trip() + notice_seconds * self.rng.random())

    def connect(self, rank: int, session: bytes, *, after: After, on_lost: Callable[[str], None]) -> SimConnection:
        """A rank registers. Raises OSError."""
        if not self.is_up:
            raise ConnectionRefusedError("connection refused")
        if rank in self.refusing:
            self.refusing.discard(rank)
            raise PermissionError("the staging cannot be registered")
        connection = SimConnection(self, self.rng.randbytes(16), self.epoch, after, on_lost)
        self.connections.append(connection)
        reply = connection.ask(
            Register(
                protocol=POOL_PROTOCOL,
                namespace=NAMESPACE,
                set_fingerprint=self.identity.fingerprint(),
                world_size=len(self.identity.geometries),
                rank=rank,
                session=session,
                instance="simulated",
                model="simulated",
                buffers=(),
            )
        )
        if not isinstance(reply, Registered):
            raise PermissionError(str(reply))
        self.registered.setdefault(session, {})[rank] = self.epoch
        if self.dying_of is Register:
            self._die(notice_seconds=3.0)
        return connection

    def _die(self, *, notice_seconds: float) -> None:
        self.dying_of = None
        self.loop.after(0.0, "the pool dies of a request", lambda: self.crash(notice_seconds=notice_seconds))
        self.loop.after(self.latency_seconds / 10, "the pool is back", self.start)

    def ended(self, connection: SimConnection) -> None:
        """A connection is no more."""
        self.connections.remove(connection)
        core = self._core
        if core is not None and connection.epoch == self.epoch:
            self._run(core, core.ended(connection.id, self.loop.now))

    def _tick(self, core: PoolCore) -> None:
        if core is self._core:
            self._run(core, core.tick(self.loop.now))
            self.loop.after(_TICK_SECONDS, "the manager's clock", lambda: self._tick(core))

    # -- the core --------------------------------------------------------------------------------------------------

    def request(
        self,
        connection: SimConnection,
        request: Request,
        on_reply: Callable[[Reply], None],
        *,
        is_at_once: bool = False,
    ) -> None:
        """A request arrives; the answer comes when storage has done what it takes, unless the process dies."""
        core = self._core
        if core is None:
            return
        if not is_at_once and type(request) is self.dying_of:
            self._die(notice_seconds=0.3)
            if self.rng.random() < 0.5:
                return
            on_reply, is_at_once = _unheard, True
        connection.num_requests += 1
        number = connection.num_requests
        self._waiting[connection.id, number] = on_reply
        self._is_at_once = is_at_once
        self._run(core, core.handle(connection.id, number, request, self.loop.now))
        self._is_at_once = False

    def transfer(self, connection: SimConnection, transfer: bytes) -> Transfer | None:
        """A transfer that units on this connection may name now."""
        return None if self._core is None else self._core.transfer(connection.id, transfer, self.loop.now)

    def visible_keys(self) -> set[bytes]:
        """What the process would show."""
        return (
            set()
            if self._core is None
            else {key for index in self._core.namespaces.values() for key in index.manifests}
        )

    def condemn(self, key: bytes) -> None:
        """Drop a record and what extends it, as an operator would."""
        core = self._core
        if core is not None:
            self._run(core, core.condemn(NAMESPACE, key, self.loop.now))

    def _run(self, core: PoolCore, effects: Iterable[CoreEffect]) -> None:
        for effect in effects:
            match effect:
                case Answer(session, number, reply):
                    on_reply = self._waiting.pop((session, number), None)
                    if on_reply is not None:
                        on_reply(reply)
                case LandShard():
                    self._apart(core, "the pool lands a shard", partial(self._land, core, effect))
                case PutManifest():
                    self._apart(core, "the pool commits", partial(self._commit, core, effect), is_ordered=True)
                case CheckShard():
                    self._apart(core, "the pool checks", partial(self._check, core, effect))
                case DeleteObjects():
                    self._apart(core, "the pool deletes", partial(self._delete, core, effect), is_ordered=True)

    def _apart(self, core: PoolCore, what: str, work: Callable[[], None], *, is_ordered: bool = False) -> None:
        """In a thread of the process, which may die before; manifests are put and objects deleted one by one."""
        if self._is_at_once:
            work()
            return
        due_at = self.loop.now + self.trip()
        if is_ordered:
            due_at = self._ordered_until = max(due_at, self._ordered_until)
        self.loop.at(due_at, what, lambda: work() if core is self._core else None)

    def _land(self, core: PoolCore, effect: LandShard) -> None:
        transfer = effect.transfer
        data = memoryview(bytearray(self.received.pop(transfer.id, b"")))
        outcome = land_shard(effect, self.storage.begin(transfer.name, len(data)), shard_check(transfer, data))
        self.counts["shards put"] += not isinstance(outcome, Refused)
        self._run(core, core.landed(transfer, effect.number, outcome))

    def _delete(self, core: PoolCore, effect: DeleteObjects) -> None:
        delete_objects(self.storage, effect)
        self._run(core, core.deleted(effect.names))

    def _commit(self, core: PoolCore, effect: PutManifest) -> None:
        outcome = put_manifest(self.storage, effect)
        self.counts["committed"] += outcome is None
        self._run(core, core.manifest_put(effect.namespace, effect.key, outcome, self.loop.now))

    def _check(self, core: PoolCore, effect: CheckShard) -> None:
        problem = check_stored_shard(self.storage, MemoryTier(0), effect)
        self.counts["bad shards found"] += problem is not None
        self._run(core, core.checked(effect, problem, self.loop.now))


def _unheard(reply: Reply) -> None:
    """The process dies before it has said it."""
    del reply
