"""An operator's questions to a manager, answered: status, records, verification, and the removal of leftovers.

Works on a server from outside; each answer is made in a thread that may block on storage.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flare_cache.pool.admin_messages import (
    Collected,
    ListRecords,
    ManagerStatus,
    NamespaceStatus,
    RecordLine,
    RecordLines,
    SessionStatus,
)
from flare_cache.pool.bulk_service import BulkService
from flare_cache.pool.core import PoolCore
from flare_cache.pool.core_words import PoolLimits
from flare_cache.pool.manifest import Manifest, parse_name, shard_name
from flare_cache.pool.memory_tier import MemoryTier
from flare_cache.pool.storage import PoolStorage
from flare_cache.pool.storage_work import stored_problem
from flare_cache.pool.stored import list_objects

__all__ = ["Administration", "collect_leftovers", "verify_records", "visible_places"]

_MAX_LINES = 5000

Place = tuple[bytes, Manifest]
"""A namespace and a record in it."""


@dataclass(slots=True)
class Administration:
    """Reads a manager's state; every method is to be called under its lock.

    Attributes:
        core, memory, bulk: the manager's.
        place: what the storage is, for people.
        limits: of the core.
    """

    core: PoolCore
    memory: MemoryTier
    bulk: BulkService
    place: str
    name: str
    epoch: bytes
    limits: PoolLimits
    started_at: float = field(default_factory=time.monotonic)

    def status(self) -> ManagerStatus:
        """Now."""
        core, memory = self.core, self.memory
        return ManagerStatus(
            name=self.name,
            epoch=self.epoch.hex(),
            storage=self.place,
            uptime_seconds=time.monotonic() - self.started_at,
            limit_bytes=self.limits.limit_bytes,
            quota_bytes=self.limits.quota_bytes,
            memory_bytes=memory.num_bytes,
            memory_limit_bytes=memory.limit_bytes,
            memory_hits=memory.num_hits,
            memory_misses=memory.num_misses,
            num_transfers=core.num_transfers,
            num_evicted=core.space.num_evicted,
            num_condemned=core.space.num_condemned,
            num_bytes_sent=self.bulk.num_bytes_sent,
            num_bytes_received=self.bulk.num_bytes_received,
            namespaces=tuple(
                NamespaceStatus(
                    namespace=namespace.hex(),
                    num_records=len(found.index.manifests),
                    num_bytes=found.index.num_bytes,
                    reserved_bytes=found.reserved_bytes,
                )
                for namespace, found in sorted(core.space.namespaces.items())
            ),
            sessions=tuple(
                SessionStatus(
                    instance=one.instance,
                    model=one.model,
                    rank=one.rank,
                    world_size=one.world_size,
                    namespace=one.namespace.hex(),
                )
                for one in core.sessions.values()
            ),
        )

    def records(self, first: int, count: int) -> tuple[list[Place], int]:
        """Some records, and how many there are."""
        namespaces = sorted(self.core.namespaces.items())
        total = sum(len(index.manifests) for _, index in namespaces)

        every = ((namespace, manifest) for namespace, index in namespaces for manifest in index.by_use())
        return list(itertools.islice(every, max(0, first), max(0, first) + min(max(0, count), _MAX_LINES))), total

    def lines(self, request: ListRecords) -> RecordLines:
        """Some records as lines."""
        found, total = self.records(request.first, request.count)
        return RecordLines(records=tuple(_line(namespace, one) for namespace, one in found), total=total)


def visible_places(core: PoolCore) -> set[tuple[bytes, bytes, bytes]]:
    """(namespace, key, store id) of everything that is visible or on its way. Under the lock."""
    places = {
        (namespace, one.record.key, one.record.store_id)
        for namespace, index in core.namespaces.items()
        for one in index.by_use()
    }
    for namespace, found in core.space.namespaces.items():
        places.update((namespace, key, store_id) for key, store_id in found.landed)
    return places


def collect_leftovers(
    storage: PoolStorage, memory: MemoryTier, visible: set[tuple[bytes, bytes, bytes]], *, grace_seconds: float
) -> Collected:
    """Remove shards that are no part of ``visible`` and older than the grace. Blocks on storage; raises OSError.

    What belongs to a manifest that is not visible here (another manager has just put it, a newer flare has written it,
    what it extends is missing) is left too: manifests are listed after the shards.
    """
    now = time.time()
    gone: list[str] = []
    num_bytes = num_young = 0
    listed = list_objects(storage).shards
    seen = {(namespace, key) for namespace, key, _ in visible}
    others = {(space, key) for space, keys in list_objects(storage).manifests.items() for key in keys} - seen
    for shards in listed.values():
        for name, found in shards.items():
            parsed = parse_name(name)
            if parsed is None or (parsed.namespace, parsed.key) in others:
                continue
            if (parsed.namespace, parsed.key, parsed.store_id) in visible:
                continue
            if now - found.modified_at < grace_seconds:
                num_young += 1
                continue
            gone.append(name)
            num_bytes += found.num_bytes
    memory.forget(gone)
    storage.delete(gone)
    return Collected(num_objects=len(gone), num_bytes=num_bytes, num_young=num_young)


def verify_records(storage: PoolStorage, found: Sequence[Place]) -> tuple[int, list[tuple[int, str]]]:
    """Bytes read, and for records that are bad their place in ``found`` and what is wrong. Blocks on storage."""
    num_bytes = 0
    bad: list[tuple[int, str]] = []
    for place, (namespace, manifest) in enumerate(found):
        for rank, shard in enumerate(manifest.shards):
            name = shard_name(namespace, manifest.record.key, manifest.record.store_id, rank)
            problem = stored_problem(storage, name, manifest, rank, None)
            num_bytes += shard.num_bytes
            if problem is not None:
                bad.append((place, f"rank {rank}: {problem}"))
                break
    return num_bytes, bad


def _line(namespace: bytes, manifest: Manifest) -> RecordLine:
    record = manifest.record
    return RecordLine(
        namespace=namespace.hex(),
        key=record.key.hex(),
        parent=record.parent_key.hex(),
        start=record.start,
        end=record.end,
        extent=manifest.extent,
        num_ranks=len(manifest.shards),
        num_bytes=manifest.num_bytes,
        created_at=manifest.created_at,
    )
