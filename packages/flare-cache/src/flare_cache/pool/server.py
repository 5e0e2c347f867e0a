"""The pool's manager as a process part: links and bulk connections around the core, storage work in threads.

The core runs under one lock, in whichever thread brings an event; what blocks on storage runs in a small pool of
threads. Nothing here decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from flare_cache.pool.admin import Administration, collect_leftovers, verify_records, visible_places
from flare_cache.pool.admin_messages import (
    POOL_ADMIN_REPLY,
    POOL_ADMIN_REQUEST,
    AdminReply,
    AdminRequest,
    Collect,
    Failed,
    ListRecords,
    Status,
    Verified,
    Verify,
    decode_admin_request,
    encode_admin,
)
from flare_cache.pool.bulk_service import BulkService
from flare_cache.pool.core import PoolCore
from flare_cache.pool.core_words import (
    Answer,
    CheckShard,
    CoreEffect,
    DeleteObjects,
    LandShard,
    PoolLimits,
    PutManifest,
    ShardFacts,
    Transfer,
)
from flare_cache.pool.landings import Landings
from flare_cache.pool.memory_tier import MemoryTier
from flare_cache.pool.messages import POOL_REPLY, POOL_REQUEST, Refused, RefusedReason, decode_request, encode_reply
from flare_cache.pool.storage import PoolStorage
from flare_cache.pool.storage_work import check_stored_shard, delete_objects, land_shard, put_manifest
from flare_cache.pool.stored import Progress, list_objects, load_manifests
from flare_transport import (
    Address,
    BulkUnit,
    FrameType,
    Link,
    LinkEnd,
    QueueFull,
    RemoteProtocolError,
    Router,
    Security,
    ServiceListener,
    ServiceSession,
    TransportError,
    UnitOp,
    open_service,
)

__all__ = ["PoolServer", "ServerSettings"]

_EPOCH_BYTES = 16
_TRANSFER_BYTES = 16
_TICK_SECONDS = 0.5
_NUM_WORKERS = 8
_NUM_WRITERS = 8
"""So many writes keep a disk busy beside connections that keep the cores busy: a writer may wait for its turn."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a manager is started with.

    Attributes:
        address: where it listens; port 0: any free one.
        key: 32 bytes that ranks share with it.
        security: TLS or plaintext.
        name: for people. place: what the storage is, for people.
        limits: of the core.
        memory_bytes: of the tier in front of storage.
        refresh_seconds: how often storage is asked for what other managers did; None: nobody else uses it.
    """

    address: Address
    key: bytes = field(repr=False)
    security: Security
    name: str
    place: str
    limits: PoolLimits
    memory_bytes: int
    refresh_seconds: float | None = None


class PoolServer:
    """A manager. :meth:`start`, then :meth:`close`; both from one thread."""

    def __init__(self, settings: ServerSettings, storage: PoolStorage) -> None:
        self.settings = settings
        self.storage = storage
        self.epoch = secrets.token_bytes(_EPOCH_BYTES)
        self.memory = MemoryTier(settings.memory_bytes)
        self.core = PoolCore(
            epoch=self.epoch,
            name=settings.name,
            limits=dataclasses.replace(settings.limits, wall_clock_offset=time.time() - time.monotonic()),
            draw_transfer=lambda: secrets.token_bytes(_TRANSFER_BYTES),
        )
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="flare pool writer")
        self._landings = Landings(storage, self._writers)
        self.bulk = BulkService(self.storage, self.memory, self._claim, self._received, self._landings)
        self._administration = Administration(
            self.core, self.memory, self.bulk, settings.place, settings.name, self.epoch, settings.limits
        )
        self._lock = threading.Lock()
        self._links: dict[bytes, Link] = {}
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="flare pool storage")
        # Manifests come and go in the order in which the core has decided it.
        self._ordered = ThreadPoolExecutor(1, thread_name_prefix="flare pool manifests")
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener: ServiceListener | None = None

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return self._listener.port if self._listener is not None else 0

    def start(self, on_progress: Progress | None = None) -> None:
        """Read every manifest, then listen. Blocks for that.

        Raises:
            OSError: storage cannot be read. AddressError: the address.
        """
        wanted = list_objects(self.storage).manifests
        for namespace, manifests in load_manifests(self.storage, wanted, on_progress).items():
            self.core.adopt(namespace, manifests)
        settings = self.settings
        self._listener = open_service(settings.address, key=settings.key, security=settings.security, epoch=self.epoch)
        threads = [("listener", self._listen), ("clock", self._run_clock), ("refresh", self._run_refresh)]
        for name, run in threads:
            thread = threading.Thread(target=run, name=f"flare pool {name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Take no more requests, end what storage is doing, close every link. Blocks for that."""
        with self._lock:
            self.core.is_draining = True
        self._closing.set()
        if self._listener is not None:
            self._listener.close()
        self._workers.shutdown(wait=True)
        self._ordered.shutdown(wait=True)
        self._writers.shutdown(wait=True)
        for link in list(self._links.values()):
            link.close()
        self.bulk.close()
        for thread in self._threads:
            thread.join()

    # -- links -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is not None:
            self._listener.serve(self._begin_link, self.bulk.serve)

    def _begin_link(self, link: Link, session: ServiceSession, source: str) -> None:
        router = Router()
        router.route(POOL_REQUEST, lambda _, payload: self._came(session.id, payload))
        router.route(POOL_ADMIN_REQUEST, lambda _, payload: self._asked(session.id, bytes(payload)))
        router.on_end(lambda _, end: self._end_link(session, source, end))
        with self._lock:
            self._links[session.id] = link
        # Both sides send heartbeats: a rank that is stopped is lost within seconds.
        link.start(router, pulse=lambda: b"")

    def _end_link(self, session: ServiceSession, source: str, end: LinkEnd) -> None:
        if self._listener is not None:
            self._listener.forget(session)
        with self._lock:
            self._links.pop(session.id, None)
        _log.info("the link to %s has ended: %s", source, end.detail)
        self._run(lambda now: self.core.ended(session.id, now))

    def _came(self, session: bytes, payload: memoryview) -> None:
        try:
            number, request = decode_request(payload)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"a pool request that cannot be read: {error}") from error
        self._run(lambda now: self.core.handle(session, number, request, now))

    def _run_clock(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            self._run(self.core.tick)

    def _run_refresh(self) -> None:
        every = self.settings.refresh_seconds
        while every is not None and not self._closing.wait(every):
            self._refresh()

    def _refresh(self) -> None:
        """See what other managers of the same storage have put and removed."""
        # First what is known here: what is committed while storage is listed is not taken for gone.
        with self._lock:
            known = {namespace: set(index.manifests) for namespace, index in self.core.namespaces.items()}
        try:
            listed = list_objects(self.storage).manifests
            unknown = {
                namespace: {key: found for key, found in keys.items() if key not in known.get(namespace, ())}
                for namespace, keys in listed.items()
            }
            loaded = load_manifests(self.storage, unknown)
        except OSError as error:
            _log.warning("the pool's storage cannot be listed: %s", error)
            return
        with self._lock:
            for namespace, keys in known.items():
                self.core.vanished(namespace, [key for key in keys if key not in listed.get(namespace, {})])
            for namespace, manifests in loaded.items():
                self.core.adopt(namespace, manifests)

    # -- the core --------------------------------------------------------------------------------------------------

    def _run(self, event: Callable[[float], Iterable[CoreEffect]]) -> None:
        with self._lock:
            effects = list(event(time.monotonic()))
            self._landings.drop_all_but(self.core.is_granted)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: CoreEffect) -> None:
        match effect:
            case Answer(session, number, reply):
                self._answer(session, POOL_REPLY, encode_reply(number, reply))
            case LandShard():
                self._apart(lambda: self._land(effect))
            case PutManifest():
                self._apart(lambda: self._put_manifest(effect), self._ordered)
            case CheckShard():
                self._apart(lambda: self._check(effect))
            case DeleteObjects(names):
                self.memory.forget(names)
                self._apart(lambda: self._delete(effect), self._ordered)

    def _answer(self, session: bytes, frame_type: FrameType, payload: bytes) -> None:
        link = self._links.get(session)
        if link is None:
            return
        try:
            link.send(frame_type, payload)
        except QueueFull as error:
            link.fail(str(error))
        except TransportError as error:
            _log.debug("an answer was not sent: %s", error)

    def _apart(self, work: Callable[[], None], threads: ThreadPoolExecutor | None = None) -> None:
        def run() -> None:
            try:
                work()
            except Exception:  # noqa: BLE001 - a worker thread's boundary
                _log.exception("storage work failed in a way that was not foreseen")

        with contextlib.suppress(RuntimeError):  # it is closing: what is not stored now is not stored
            (threads or self._workers).submit(run)

    def _land(self, effect: LandShard) -> None:
        landing = self._landings.take(effect.transfer.id)
        if landing is None:
            outcome: ShardFacts | Refused = Refused(reason=RefusedReason.INCOMPLETE, detail="nothing was received")
        else:
            outcome = land_shard(effect, landing, landing.check)
            # Every connection that wrote to it has been answered.
            if isinstance(outcome, Refused) or not self.memory.put(effect.transfer.name, landing.data):
                self._landings.use_again(landing)
        self._run(lambda _: self.core.landed(effect.transfer, effect.number, outcome))

    def _put_manifest(self, effect: PutManifest) -> None:
        outcome = put_manifest(self.storage, effect)
        self._run(lambda now: self.core.manifest_put(effect.namespace, effect.key, outcome, now))

    def _delete(self, effect: DeleteObjects) -> None:
        try:
            delete_objects(self.storage, effect)
        finally:
            self._run(lambda _: self.core.deleted(effect.names))

    def _check(self, effect: CheckShard) -> None:
        try:
            problem = check_stored_shard(self.storage, self.memory, effect)
        except OSError as error:
            _log.warning("a reported shard cannot be read: %s", error)
            problem = None
        self._run(lambda now: self.core.checked(effect, problem, now))

    # -- operators -------------------------------------------------------------------------------------------------

    def _asked(self, session: bytes, payload: bytes) -> None:
        try:
            request = decode_admin_request(payload)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"an admin request that cannot be read: {error}") from error

        def answer() -> None:
            try:
                reply = self._administer(request)
            except OSError as error:
                reply = Failed(detail=f"the pool's storage: {error}")
            self._answer(session, POOL_ADMIN_REPLY, encode_admin(reply))

        self._apart(answer)

    def _administer(self, request: AdminRequest) -> AdminReply:
        administration = self._administration
        match request:
            case Status():
                with self._lock:
                    return administration.status()
            case ListRecords():
                with self._lock:
                    return administration.lines(request)
            case Verify():
                return self._verify(request)
            case Collect():
                with self._lock:
                    visible = visible_places(self.core)
                return collect_leftovers(
                    self.storage, self.memory, visible, grace_seconds=self.settings.limits.grace_seconds
                )

    def _verify(self, request: Verify) -> Verified:
        with self._lock:
            found, total = self._administration.records(request.first, request.count)
        num_bytes, bad = verify_records(self.storage, found)
        for place, _ in bad if request.remove else ():
            namespace, manifest = found[place]
            self._run(lambda now, n=namespace, k=manifest.record.key: self.core.condemn(n, k, now))  # type: ignore[misc]
        return Verified(
            num_records=len(found),
            num_bytes=num_bytes,
            total=total,
            bad=tuple((found[place][1].record.key.hex(), problem) for place, problem in bad),
        )

    # -- bulk ------------------------------------------------------------------------------------------------------

    def _claim(self, session: bytes, unit: BulkUnit) -> Transfer | None:
        with self._lock:
            transfer = self.core.transfer(session, unit.transfer, time.monotonic())
            if transfer is None or (transfer.record is not None) != (unit.op is UnitOp.PUT):
                return None
            return transfer if transfer.claim(unit.offset, unit.length) else None

    def _received(self, transfer: Transfer, num_bytes: int) -> None:
        with self._lock:
            transfer.num_received += num_bytes
