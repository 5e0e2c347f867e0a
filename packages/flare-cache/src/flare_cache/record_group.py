"""Brings up the group half of the record path on one rank: transport, scan, links, join, then serving.

The one place that knows the order of these steps. What is measured, configured or shown to people is decided by the
caller, who also brings shelves, page memory and connected links.
"""

from __future__ import annotations

import contextlib
import gc
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flare_cache.directory import RecordDirectory
from flare_cache.dispatcher import Dispatcher
from flare_cache.eviction import Budget
from flare_cache.index import RecordIndex
from flare_cache.jobs import JobResult
from flare_cache.join import ApplyHere, Finished, JoinLeader, JoinPeer
from flare_cache.join_directory import apply_verdicts, make_statement
from flare_cache.join_messages import Applied, Broken, JoinMessage, Refused, encode_message
from flare_cache.join_report import JoinReport
from flare_cache.join_set import adopt
from flare_cache.join_shell import JOIN_TIMEOUT_SECONDS, JoinInbox, join_as_leader, join_as_peer
from flare_cache.outcomes import ShardedLimits
from flare_cache.peer_service import PeerService, ServiceEnd
from flare_cache.pool.agent import LeaderPoolAgent, PoolAgent
from flare_cache.pool.agreement_messages import encode_pool_message
from flare_cache.pool.setup import PoolSetup, new_agent, new_leader_agent
from flare_cache.record_link import RECORD_JOIN
from flare_cache.record_plan import FileSizes, record_bounds
from flare_cache.record_table import RecordTable, find_digests
from flare_cache.scan import Scan, save_join_index, scan_directory
from flare_cache.settings import CacheSettings
from flare_cache.sharded import ShardedLeader
from flare_cache.staged import StagedTransport
from flare_cache.tier_records import JobQueue
from flare_cache.tier_store import PoolTierSettings, TierContent, TierStore
from flare_core.errors import ConfigurationMismatch
from flare_core.geometry import Geometry
from flare_core.prefix import Tier
from flare_transport.errors import TransportError
from flare_transport.failpoint import failpoint
from flare_transport.link import Link
from flare_transport.router import Router

__all__ = ["LeaderGroup", "PeerGroup", "RankSetup", "new_store", "start_leader", "start_peer"]

_STORE_ID_BYTES = 16
_ABORT_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What a rank brings.

    Attributes:
        settings: see :class:`flare_cache.settings.CacheSettings`.
        rank: this rank; its geometry is ``settings.identity.geometries[rank]``.
        directory: open and locked; None without a disk tier. Closed by the caller.
        make_transport: builds this rank's transport, not started, with the ``on_result`` and ``on_fault`` that it is
            given.
        pool: of the pool; None without one.
    """

    settings: CacheSettings
    rank: int
    directory: RecordDirectory | None
    make_transport: Callable[[Callable[[JobResult], None], Callable[[str], None]], StagedTransport]
    pool: PoolSetup | None = None

    @property
    def geometry(self) -> Geometry:
        """This rank's."""
        return self.settings.identity.geometries[self.rank]

    def scan(self) -> Scan | None:
        """Read the directory; rank zero keeps token ids, which its index needs."""
        if self.directory is None:
            return None
        failpoint("join.scan")
        return scan_directory(
            self.directory,
            geometry=self.geometry,
            set_fingerprint=self.settings.identity.fingerprint(),
            with_token_ids=self.rank == 0,
        )

    def apply(self, scan: Scan | None, effect: ApplyHere) -> Applied:
        """Do to the directory what was agreed."""
        if self.directory is None or scan is None:
            return Applied(0, 0, 0)
        failpoint("join.apply")
        return apply_verdicts(
            self.directory,
            scan,
            effect.verdicts,
            set_id=effect.set_id,
            settings=self.settings,
            geometry=self.geometry,
        )

    def save_hint(self, keys_by_use: list[bytes]) -> None:
        """Write ``join.idx`` for the next start, when nothing runs any more. Keys not named are older.

        Raises:
            OSError: it could not be written; the next start then opens every header.
        """
        scan = self.scan()
        if self.directory is None or scan is None:
            return
        place = find_digests(scan.records.keys, b"".join(keys_by_use))
        failpoint("join.save-hint")
        save_join_index(
            self.directory,
            scan.records.taken(np.argsort(place, kind="stable")),
            geometry=self.geometry,
            set_fingerprint=self.settings.identity.fingerprint(),
        )


@dataclass(frozen=True, slots=True)
class LeaderGroup:
    """Rank zero, serving.

    Attributes:
        store: the engine's prefix store.
        dispatcher: also rank zero's job gate (``step_finished``, ``wait_for_jobs``).
        transport: rank zero's own.
        report: of the join.
        setup: as given.
        pool: the agreement on the pool; None without one.
    """

    store: TierStore
    dispatcher: Dispatcher
    transport: StagedTransport
    report: JoinReport
    setup: RankSetup
    pool: LeaderPoolAgent | None = None

    def close(self, deadline_seconds: float) -> bool:
        """End in order; the engine has stopped and ``store.is_idle`` holds (or what is under way is given up).

        Returns whether transfers drained. If not, free nothing and end by ``os._exit``.
        """
        keys = self.store.keys_by_use(Tier.DISK)
        if self.pool is not None:
            self.pool.close()
        if not self.dispatcher.close(deadline_seconds):
            return False
        self.setup.save_hint(keys)
        return True


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """A peer, serving. ``service`` is also its job gate."""

    service: PeerService
    transport: StagedTransport
    report: JoinReport
    setup: RankSetup
    pool: PoolAgent | None = None

    def close(self, deadline_seconds: float) -> bool:
        """End in order from this side, or after rank zero has; see :meth:`LeaderGroup.close`."""
        is_drained = self.service.close(deadline_seconds)
        if self.pool is not None:
            self.pool.close()
        is_drained = is_drained and self.transport.close(deadline_seconds)
        if is_drained:
            self.setup.save_hint([])
        return is_drained


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """A scan of 100,000 records makes millions of objects and no garbage: collections would double its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def start_leader(
    setup: RankSetup,
    links: Mapping[int, Link],
    *,
    run_id: bytes,
    on_outcome: Callable[[], None],
    on_poison: Callable[[str], None],
    limits: ShardedLimits | None = None,
    timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
) -> LeaderGroup:
    """Bring up rank zero; blocks until every rank has joined.

    Args:
        setup: rank zero's.
        links: record links by rank, proven and not started; empty for a group of one.
        run_id: of the session.
        on_outcome: wakes the engine, whose next ``store.poll()`` has something new; any thread, must not block.
        on_poison: tells the watchdog; any thread, must not block.
        limits: of the sharded transport.
        timeout_seconds: for the whole join.

    Raises:
        ConfigurationMismatch, UsageError: as :func:`flare_cache.join_shell.join_as_leader`.
        RuntimeError, OSError: no threads, or the directory cannot be read.
    """
    world_size = setup.settings.identity.world_size
    pool: LeaderPoolAgent | None = None
    if setup.pool is not None:
        pool = new_leader_agent(
            setup.pool,
            world_size=world_size,
            tell=lambda rank, payload: dispatcher.tell(rank, payload),  # noqa: PLW0108  it is made below
        )
    dispatcher = Dispatcher(
        ShardedLeader(run_id=run_id, world_size=world_size, limits=limits or ShardedLimits()),
        on_outcome=on_outcome,
        on_poison=on_poison,
        on_pool=None if pool is None else pool.receive,
    )
    transport = setup.make_transport(dispatcher.finished_here, dispatcher.fault_here)
    sizes = FileSizes(setup.settings.identity.geometries)
    with _collector_paused():
        try:
            inbox = _start_links(dispatcher, links)
            transport.start()
            joined = _join_leader(setup, sizes, links, inbox, timeout_seconds)
        except BaseException as error:
            lines = [str(error) or type(error).__name__]
            _abandon(transport, links, Refused(lines, isinstance(error, ConfigurationMismatch)))
            raise
        store = new_store(setup, sizes, joined=joined, jobs=dispatcher)
    failpoint("join.joined")
    dispatcher.start(transport, links)
    if setup.pool is not None and pool is not None:
        _start_pool(setup.pool, pool, store, world_size=world_size, wake=on_outcome)
    return LeaderGroup(store, dispatcher, transport, joined.report, setup, pool)


def _start_pool(
    setup: PoolSetup, agent: LeaderPoolAgent, store: TierStore, *, world_size: int, wake: Callable[[], None]
) -> None:
    tier = store.open_pool(PoolTierSettings(world_size, setup.pending_bytes, wake, setup.is_always_worth))
    agent.start(new_agent(setup, 0, say=lambda message: agent.heard(0, message), switches=[tier]))


def _start_links(dispatcher: Dispatcher, links: Mapping[int, Link]) -> JoinInbox:
    inbox = JoinInbox()
    for rank, link in links.items():
        router = Router()
        dispatcher.route(router, rank)
        inbox.route(router, rank)
        link.start(router, pulse=dispatcher.pulse)
    return inbox


def _join_leader(
    setup: RankSetup, sizes: FileSizes, links: Mapping[int, Link], inbox: JoinInbox, timeout_seconds: float
) -> Finished:
    scan = setup.scan()
    leader = JoinLeader(
        make_statement(setup.settings, setup.geometry, setup.directory, scan),
        scan.records if scan is not None else RecordTable.of(()),
        world_size=setup.settings.identity.world_size,
        sizes=sizes,
        accept_loss=setup.settings.accept_loss,
        draw_set_id=_draw_store_id,
    )
    return join_as_leader(
        leader, links, inbox, lambda effect: setup.apply(scan, effect), timeout_seconds=timeout_seconds
    )


def start_peer(
    setup: RankSetup,
    link: Link,
    *,
    run_id: bytes,
    on_end: Callable[[ServiceEnd], None],
    timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
) -> PeerGroup:
    """Bring up a peer; blocks until every rank has joined. Raises as :func:`start_leader`.

    Args:
        setup: this rank's.
        link: the record link to rank zero, proven and not started.
        run_id: of the session.
        on_end: called once the record link has ended after the join; the process is to end then.
        timeout_seconds: for the whole join.
    """
    pool: PoolAgent | None = None
    if setup.pool is not None:
        pool = new_agent(setup.pool, setup.rank, say=lambda message: service.say(encode_pool_message(message)))
    service = PeerService(run_id=run_id, rank=setup.rank, on_end=on_end, on_pool=None if pool is None else pool.receive)
    transport = setup.make_transport(service.finished_here, service.fault_here)
    service.attach(transport, link)
    router, inbox = Router(), JoinInbox()
    service.route(router)
    inbox.route(router, 0)
    with _collector_paused():
        try:
            link.start(router, pulse=service.pulse)
            # Threads and directory first: a rank that cannot open them fails the join, not serving.
            transport.start()
            joined = _join_peer(setup, link, inbox, timeout_seconds)
        except BaseException as error:
            _abandon(transport, {0: link}, Broken(str(error) or type(error).__name__))
            raise
    failpoint("join.joined")
    service.serve()
    return PeerGroup(service, transport, joined.report, setup, pool)


def _join_peer(setup: RankSetup, link: Link, inbox: JoinInbox, timeout_seconds: float) -> Finished:
    scan = setup.scan()
    peer = JoinPeer(
        make_statement(setup.settings, setup.geometry, setup.directory, scan),
        scan.records if scan is not None else RecordTable.of(()),
    )
    return join_as_peer(peer, link, inbox, lambda effect: setup.apply(scan, effect), timeout_seconds=timeout_seconds)


def _draw_store_id() -> bytes:
    return secrets.token_bytes(_STORE_ID_BYTES)


def new_store(
    setup: RankSetup,
    sizes: FileSizes,
    *,
    joined: Finished,
    jobs: JobQueue,
    clock: Callable[[], float] = time.monotonic,
    draw_store_id: Callable[[], bytes] = _draw_store_id,
) -> TierStore:
    """The engine's prefix store over what was agreed."""
    settings = setup.settings
    return TierStore(
        _tiers(settings, joined),
        bounds=record_bounds(
            settings.identity.geometries,
            min_tail_tokens=settings.min_tail_tokens,
            max_record_bytes=settings.max_record_bytes,
        ),
        sizes=sizes,
        jobs=jobs,
        has_rows=setup.geometry.row_bytes > 0,
        clock=clock,
        draw_store_id=draw_store_id,
        min_restore_tokens=settings.min_tail_tokens,
    )


def _tiers(settings: CacheSettings, joined: Finished) -> dict[Tier, TierContent]:
    """Each configured tier as it begins: memory empty, disk with what was agreed."""
    tiers: dict[Tier, TierContent] = {}
    page_tokens = settings.identity.page_tokens
    report, agreement = joined.report, joined.agreement
    if settings.memory_bytes is not None:
        tiers[Tier.MEMORY] = TierContent(RecordIndex(page_tokens), Budget(report.memory_limit_bytes))
    if settings.has_disk and agreement is not None:
        charged = agreement.kept_bytes + report.left_bytes
        tiers[Tier.DISK] = TierContent(adopt(agreement, page_tokens), Budget(report.disk_limit_bytes, charged))
    return tiers


def _abandon(transport: StagedTransport, links: Mapping[int, Link], last_word: JoinMessage) -> None:
    """Start-up failed: tell the other side why, if it does not know yet, and let go of everything."""
    for link in links.values():
        with contextlib.suppress(TransportError):
            link.send(RECORD_JOIN, encode_message(last_word))
        link.shutdown()
    transport.close(_ABORT_SECONDS)
    for link in links.values():
        link.wait_ended(_ABORT_SECONDS)
        link.close()
