"""The prefix cache of one rank, put together: directory, shelves, transport, record links and join.

Part of the composition root. Without a directory and a memory tier there is nothing to put together.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flare_cache.directory import RecordDirectory
from flare_cache.disk_shelf import DEFAULT_PART_BYTES, DiskShelf, Durability, use_direct
from flare_cache.host_memory import DirectPassage, Passage
from flare_cache.jobs import JobResult
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.peer_service import ServiceEnd
from flare_cache.record_file import DiskTransport
from flare_cache.record_group import LeaderGroup, PeerGroup, RankSetup, start_leader, start_peer
from flare_cache.settings import CacheSettings
from flare_cache.staged import DEFAULT_NUM_THREADS, StagedTransport
from flare_cache.transfer import Shelf
from flare_cli.agreement import Offer
from flare_cli.cache_report import cache_facts, cache_snapshot
from flare_cli.config import RunConfig
from flare_cli.control_group import ControlGroup
from flare_cli.salt import salt_key
from flare_cli.snapshot import CacheSnapshot
from flare_cli.units import format_size
from flare_cli.wiring import RankModel, host_memory_bytes
from flare_core.engine.engine import NoGate
from flare_core.errors import UsageError
from flare_core.geometry import PAGE_ALIGNMENT, Geometry, SetIdentity, align_up
from flare_core.keys import salt_key_id
from flare_core.ports import JobGate, PrefixStore
from flare_core.prefix import Tier
from flare_transport import Link, dial_link, open_link_listener
from flare_transport.failpoint import failpoint

if TYPE_CHECKING:
    from flare_cli.pool_wiring import RankPool

__all__ = ["Loss", "RankCache", "open_leader_cache", "open_peer_cache"]

_LOG = logging.getLogger("flare")

LINK_PURPOSE = "records"
DRAIN_SECONDS = 10.0
IDLE_POLL_SECONDS = 0.005

Loss = Callable[[str], None]


def _nothing() -> None:
    """What a cache without tiers does when it is closed or woken."""


@dataclass(slots=True)
class RankCache:
    """What the engine and the rank's life need of a cache.

    ``snapshot`` is told whether every record's state in the pool is wanted. ``row_interval_tokens``: models with rows
    keep one at least so often. ``wake`` is called when the store has events.
    """

    store: PrefixStore | None = None
    gate: JobGate = field(default_factory=NoGate)
    facts: tuple[tuple[str, str], ...] = ()
    row_interval_tokens: int = 0
    snapshot: Callable[[bool], CacheSnapshot | None] = lambda _: None
    close: Callable[[], None] = _nothing
    wake: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class _Parts:
    """One rank's half of the record path before the others are met."""

    setup: RankSetup
    directory: RecordDirectory | None
    direct: bool
    least_bytes: int
    staging: contextlib.ExitStack

    def release(self) -> None:
        """Give the directory's lock and the staging back; nothing moves bytes any more."""
        self.staging.close()
        if self.directory is not None:
            self.directory.close()


def open_leader_cache(config: RunConfig, group: ControlGroup, model: RankModel, *, on_loss: Loss) -> RankCache:
    """Rank zero's cache; blocks until all ranks have joined theirs.

    Raises:
        UsageError, ConfigurationMismatch: the directory, the settings or another rank's; TransportError: a record link.
    """
    if not _has_tiers(config):
        return RankCache()
    parts = _open_parts(config, model)
    cache = RankCache()
    try:
        group.agree(Offer({}))
        links = _accept_links(group)
        leader = start_leader(
            parts.setup,
            links,
            run_id=group.session.run_id,
            on_outcome=lambda: cache.wake(),  # noqa: PLW0108  it is set when the engine is there
            on_poison=on_loss,
        )
    except OSError as error:
        parts.release()
        raise _unusable(config, error) from error
    except BaseException:
        parts.release()
        raise
    cache.store, cache.gate = leader.store, leader.dispatcher
    cache.facts = cache_facts(config, leader.report, direct=parts.direct, least_bytes=parts.least_bytes)
    cache.row_interval_tokens = leader.store.record_tokens if parts.setup.geometry.row_bytes else 0
    cache.snapshot = lambda with_records: cache_snapshot(
        leader, config, now=time.monotonic(), with_records=with_records
    )
    cache.close = lambda: _close_leader(leader, parts, flush_seconds=config.pool_flush_timeout)
    return cache


def open_peer_cache(config: RunConfig, group: ControlGroup, model: RankModel, *, on_loss: Loss) -> RankCache:
    """A peer's cache; blocks and raises as :func:`open_leader_cache`."""
    if not _has_tiers(config):
        return RankCache()
    parts = _open_parts(config, model)

    def ended(end: ServiceEnd) -> None:
        if end.is_loss or not end.is_drained:
            on_loss(f"{end.loss}: the record link to rank 0 is lost: {end.reason}")

    try:
        group.agree(Offer({}))
        link = dial_link(group.session, group.identities[0], group.offers.get())
        peer = start_peer(parts.setup, link, run_id=group.session.run_id, on_end=ended)
    except OSError as error:
        parts.release()
        raise _unusable(config, error) from error
    except BaseException:
        parts.release()
        raise
    return RankCache(
        gate=peer.service,
        facts=cache_facts(config, peer.report, direct=parts.direct, least_bytes=parts.least_bytes),
        close=lambda: _close_peer(peer, parts),
    )


def _unusable(config: RunConfig, error: OSError) -> UsageError:
    """What stopped the join here; links have errors of their own kind."""
    return UsageError(f"--prefix-cache-disk {config.prefix_cache_disk}: it cannot be read or written: {error}")


def _has_tiers(config: RunConfig) -> bool:
    return config.prefix_cache_disk is not None or _memory_bytes(config) > 0


def _memory_bytes(config: RunConfig) -> int:
    """Of the memory tier. A pool is put into from a tier: without one, from records in memory within its budget."""
    if config.pool is not None and config.prefix_cache_disk is None:
        return config.prefix_cache_memory or config.pool_pending
    return config.prefix_cache_memory


def _accept_links(group: ControlGroup) -> Mapping[int, Link]:
    if group.world_size == 1:
        return {}
    listener = open_link_listener(group.session, list(group.identities.values()), purpose=LINK_PURPOSE)
    try:
        for rank, offer in listener.offers.items():
            failpoint("record-link.offer")
            group.send_offer(rank, offer)
        return listener.accept()
    finally:
        listener.close()


def _settings(config: RunConfig, identity: SetIdentity) -> CacheSettings:
    return CacheSettings(
        identity=identity,
        salt_key_id=salt_key_id(salt_key(config)),
        has_disk=config.prefix_cache_disk is not None,
        disk_limit_bytes=config.prefix_cache_disk_limit,
        memory_bytes=_memory_bytes(config) or None,
        min_tail_tokens=config.prefix_cache_min_tail,
        durability=Durability(config.prefix_cache_durability),
        accept_loss=config.prefix_cache_accept_loss,
    )


def _open_parts(config: RunConfig, model: RankModel) -> _Parts:
    identity = model.identity
    settings = _settings(config, identity)
    _check_limits(config, identity)
    geometry = identity.geometries[config.rank]
    directory = None
    direct = False
    staging = contextlib.ExitStack()
    try:
        if config.prefix_cache_disk is not None:
            directory = RecordDirectory.open(config.prefix_cache_disk)
            direct = _use_direct(directory, config)
        passage = _open_passage(model, staging, aligned=direct, num_threads=DEFAULT_NUM_THREADS)
    except BaseException:
        staging.close()
        if directory is not None:
            directory.close()
        raise
    shelves = _open_shelves(settings, geometry, directory=directory, passage=passage, direct=direct)
    pool = _open_pool(config, model, shelves=shelves, staging=staging)

    def make_transport(on_result: Callable[[JobResult], None], on_fault: Callable[[str], None]) -> StagedTransport:
        return StagedTransport(
            geometry=geometry,
            num_pages=model.num_pages,
            num_slots=config.max_sequences + model.num_row_snapshots if geometry.row_bytes else 0,
            memory=model.memory,
            shelves=shelves,
            on_result=on_result,
            on_fault=on_fault,
            pool=None if pool is None else pool.shelf,
            num_pool_threads=0 if pool is None else pool.num_threads,
        )

    setup = RankSetup(
        settings=settings,
        rank=config.rank,
        directory=directory,
        make_transport=make_transport,
        pool=None if pool is None else pool.setup,
    )
    return _Parts(setup, directory, direct, _least_record_bytes(identity), staging)


def _open_shelves(
    settings: CacheSettings, geometry: Geometry, *, directory: RecordDirectory | None, passage: Passage, direct: bool
) -> dict[Tier, Shelf]:
    fingerprint = settings.identity.fingerprint()
    shelves: dict[Tier, Shelf] = {}
    if directory is not None:
        shelves[Tier.DISK] = DiskShelf(
            directory=directory,
            geometry=geometry,
            set_fingerprint=fingerprint,
            passage=passage,
            direct=direct,
            durability=settings.durability,
        )
    if settings.memory_bytes is not None:
        shelves[Tier.MEMORY] = MemoryShelf(
            geometry=geometry, set_fingerprint=fingerprint, passage=passage, limit_bytes=settings.memory_bytes
        )
    return shelves


def _open_pool(
    config: RunConfig, model: RankModel, *, shelves: Mapping[Tier, Shelf], staging: contextlib.ExitStack
) -> RankPool | None:
    if config.pool is None:
        return None
    from flare_cache.pool.shelf import NUM_THREADS  # a rank without a pool starts quicker without these
    from flare_cli.pool_wiring import open_pool

    # Its own way to the pages: one that waits for the pool holds up no transfer of the disk's.
    passage = _open_passage(model, staging, aligned=False, num_threads=NUM_THREADS)
    return open_pool(config, model, shelves=shelves, passage=passage)


def _least_record_bytes(identity: SetIdentity) -> int:
    """What a record of one page takes on the rank where it is largest."""
    return max(each.page_bytes + align_up(each.row_stride, PAGE_ALIGNMENT) for each in identity.geometries) + (
        PAGE_ALIGNMENT  # its header
    )


def _check_limits(config: RunConfig, identity: SetIdentity) -> None:
    """A tier that cannot hold a record of one page would never hold anything, and nobody would know why."""
    least = _least_record_bytes(identity)
    for flag, limit in (
        ("--prefix-cache-disk-limit", config.prefix_cache_disk_limit),
        ("--prefix-cache-memory", config.prefix_cache_memory or None),
        ("--pool-pending", None if config.pool is None else config.pool_pending),
    ):
        if limit is not None and limit < least:
            msg = f"{flag} {format_size(limit)}: a record of one page takes {format_size(least)}; give more"
            raise UsageError(msg)
    if config.prefix_cache_memory > host_memory_bytes():
        msg = (
            f"--prefix-cache-memory {format_size(config.prefix_cache_memory)} is more than the "
            f"{format_size(host_memory_bytes())} of this machine; give less"
        )
        raise UsageError(msg)


def _use_direct(directory: RecordDirectory, config: RunConfig) -> bool:
    try:
        return use_direct(directory, DiskTransport(config.prefix_cache_disk_transport))
    except OSError as error:
        msg = f"--prefix-cache-disk {directory.path}: cannot be written: {error.strerror}"
        raise UsageError(msg) from None


def _open_passage(model: RankModel, staging: contextlib.ExitStack, *, aligned: bool, num_threads: int) -> Passage:
    kind, _, ordinal = model.memory.device.partition(":")
    if kind == "cpu":
        return DirectPassage(aligned=aligned)
    from flare_cache.cuda_staging import open_cuda_staging

    least = max(max(each.page_bytes, each.row_stride) for each in model.identity.geometries)
    buffer_bytes = align_up(max(DEFAULT_PART_BYTES, least), PAGE_ALIGNMENT)
    cuda = open_cuda_staging(int(ordinal or 0), num_buffers=num_threads, buffer_bytes=buffer_bytes)
    staging.callback(cuda.close)
    return cuda


def _close_leader(leader: LeaderGroup, parts: _Parts, *, flush_seconds: float) -> None:
    """Finish what is on its way, end the record links, write the hint for the next start, give the lock back."""
    _poll_until(leader, lambda: leader.store.is_idle, DRAIN_SECONDS)
    pool = leader.store.pool
    if pool is not None and pool.has_pending:
        _LOG.info("putting %d pending records into the pool", pool.statistics().num_pending)
        _poll_until(leader, lambda: not (pool.is_on and pool.has_pending), flush_seconds)
        num_left = pool.statistics().num_pending
        if num_left:
            _LOG.warning("%d records have not reached the pool; those on disk are put after the next start", num_left)
    _finish(leader.close, parts)


def _poll_until(leader: LeaderGroup, condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        leader.store.poll()
        time.sleep(IDLE_POLL_SECONDS)


def _close_peer(peer: PeerGroup, parts: _Parts) -> None:
    _finish(peer.close, parts)


def _finish(close: Callable[[float], bool], parts: _Parts) -> None:
    try:
        is_drained = close(DRAIN_SECONDS)
    except OSError as error:
        _LOG.warning("the hint for the next start could not be written (it will read every header): %s", error)
        is_drained = True
    if is_drained:
        parts.release()
    else:
        # Some thread still moves bytes: the process ends with everything as it is.
        _LOG.warning("transfers did not end within %g s", DRAIN_SECONDS)
