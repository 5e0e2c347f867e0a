"""What the manager does with its storage: shards verified and landed, manifests put, reports checked, objects deleted.

Each function blocks, is run in a thread of its own, and turns what goes wrong into a reason that the core can tell.
"""

from __future__ import annotations

import logging

import msgspec

from flare_cache.pool.core_words import CheckShard, DeleteObjects, LandShard, PutManifest, ShardFacts
from flare_cache.pool.manifest import Manifest, decode_manifest, shard_name
from flare_cache.pool.memory_tier import MemoryTier
from flare_cache.pool.messages import Refused, RefusedReason
from flare_cache.pool.shard_check import ShardCheck, check_shard
from flare_cache.pool.storage import PoolStorage, Upload
from flare_cache.pool.stored import list_objects, read_object
from flare_cache.record import RecordError
from flare_transport.failpoint import failpoint

__all__ = ["check_stored_shard", "delete_objects", "land_shard", "put_manifest", "stored_problem"]

_log = logging.getLogger(__name__)


def land_shard(effect: LandShard, upload: Upload, check: ShardCheck) -> ShardFacts | Refused:
    """Verify what was received and make it durable; nothing of it stays where that fails."""
    transfer = effect.transfer
    try:
        facts = check.finish()
        failpoint("manager.store-shard")
        upload.commit(check.data)
    except RecordError as error:
        upload.abort()
        return Refused(reason=RefusedReason.CORRUPT, detail=str(error))
    except OSError as error:
        _log.warning("%s cannot be stored: %s", transfer.name, error)
        upload.abort()
        return Refused(reason=RefusedReason.STORAGE, detail=error.strerror or str(error))
    return facts


def put_manifest(storage: PoolStorage, effect: PutManifest) -> Manifest | Refused | None:
    """Make a record visible: None; or the manifest that was first; or why not."""
    try:
        failpoint("manager.commit")
        if storage.put_if_absent(effect.name, effect.data):
            return None
        sizes = list_objects(storage, effect.name).manifests.get(effect.namespace, {})
        return decode_manifest(bytes(read_object(storage, effect.name, sizes[effect.key].num_bytes)))
    except (OSError, KeyError, msgspec.MsgspecError) as error:
        _log.warning("%s cannot be put: %s", effect.name, error)
        return Refused(reason=RefusedReason.STORAGE, detail=str(error))


def check_stored_shard(storage: PoolStorage, memory: MemoryTier, effect: CheckShard) -> str | None:
    """What is wrong with a stored shard, read from storage and, if it is there, from memory; None: nothing."""
    name = shard_name(effect.namespace, effect.manifest.record.key, effect.manifest.record.store_id, effect.rank)
    held = memory.get(name)
    if held is not None and (problem := _problem(held, effect.manifest, effect.rank, effect.set_fingerprint)):
        memory.forget([name])
        return problem
    return stored_problem(storage, name, effect.manifest, effect.rank, effect.set_fingerprint)


def stored_problem(
    storage: PoolStorage, name: str, manifest: Manifest, rank: int, set_fingerprint: bytes | None
) -> str | None:
    """What is wrong with a shard in storage; None: nothing. Storage that cannot be read is no verdict: OSError."""
    try:
        data = read_object(storage, name, manifest.shards[rank].num_bytes)
    except FileNotFoundError:
        return "missing"
    return _problem(data, manifest, rank, set_fingerprint)


def _problem(data: memoryview, manifest: Manifest, rank: int, set_fingerprint: bytes | None) -> str | None:
    try:
        facts = check_shard(
            data,
            record=manifest.record,
            extent=manifest.extent,
            set_fingerprint=set_fingerprint,
            rank=rank,
            world_size=len(manifest.shards),
        )
    except RecordError as error:
        return str(error)
    return None if facts.header_digest == manifest.shards[rank].header_digest else "not the header of the manifest"


def delete_objects(storage: PoolStorage, effect: DeleteObjects) -> None:
    """Delete; what cannot be deleted now is found by gc."""
    try:
        failpoint("manager.delete")
        storage.delete(effect.names)
    except OSError as error:
        _log.warning("%d objects cannot be deleted: %s", len(effect.names), error)
