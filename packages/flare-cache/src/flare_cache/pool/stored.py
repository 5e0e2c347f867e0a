"""Reading what the pool's storage holds: manifests, as they are listed and loaded, and whole objects. Blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from flare_cache.host_memory import aligned_buffer
from flare_cache.pool.manifest import MANIFEST_FORMAT, Manifest, ObjectKind, decode_manifest, parse_name
from flare_cache.pool.storage import PoolStorage, StoredObject
from flare_cache.record import identity_problem

__all__ = ["Listing", "list_objects", "load_manifests", "read_object"]

_MAX_MANIFEST_BYTES = 2 << 20
_NUM_READERS = 16
_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Manifests read so far, and how many there are."""


@dataclass(slots=True)
class Listing:
    """Objects as listed, by namespace: manifests by key, and shards by name."""

    manifests: dict[bytes, dict[bytes, StoredObject]] = field(default_factory=dict)
    shards: dict[bytes, dict[str, StoredObject]] = field(default_factory=dict)


def list_objects(storage: PoolStorage, prefix: str = "v1/") -> Listing:
    """What is there. Names of other kinds are left out. Raises OSError."""
    listing = Listing()
    for found in storage.list(prefix):
        parsed = parse_name(found.name)
        if parsed is None:
            continue
        if parsed.kind is ObjectKind.MANIFEST:
            listing.manifests.setdefault(parsed.namespace, {})[parsed.key] = found
        else:
            listing.shards.setdefault(parsed.namespace, {})[found.name] = found
    return listing


def load_manifests(
    storage: PoolStorage, wanted: Mapping[bytes, Mapping[bytes, StoredObject]], on_progress: Progress | None = None
) -> dict[bytes, list[Manifest]]:
    """The manifests in ``wanted``, oldest first; those that cannot be read, or are of a newer format, are left out.

    Raises:
        OSError: storage fails; an object that has gone meanwhile is no failure.
    """
    tasks = [(namespace, key, found) for namespace, keys in wanted.items() for key, found in keys.items()]
    loaded: dict[bytes, list[Manifest]] = {}
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="flare pool scan") as readers:
        results = readers.map(lambda task: _load(storage, task[1], task[2]), tasks)
        for number, ((namespace, _, _), manifest) in enumerate(zip(tasks, results, strict=True), 1):
            if manifest is not None:
                loaded.setdefault(namespace, []).append(manifest)
            if on_progress is not None:
                on_progress(number, len(tasks))
    for manifests in loaded.values():
        manifests.sort(key=lambda one: one.created_at)
    return loaded


def _load(storage: PoolStorage, key: bytes, found: StoredObject) -> Manifest | None:
    if found.num_bytes > _MAX_MANIFEST_BYTES:
        _log.warning("%s is left alone: a manifest has at most %d bytes", found.name, _MAX_MANIFEST_BYTES)
        return None
    try:
        manifest = decode_manifest(bytes(read_object(storage, found.name, found.num_bytes)))
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        _log.warning("%s is left alone: %s", found.name, error)
        return None
    problem = identity_problem(manifest.record)
    is_newer = manifest.format > MANIFEST_FORMAT
    if problem or is_newer or manifest.record.key != key:
        _log.warning("%s is left alone: %s", found.name, "a newer format" if is_newer else problem or "another key")
        return None
    return manifest


def read_object(storage: PoolStorage, name: str, num_bytes: int) -> memoryview:
    """A whole object. Raises OSError."""
    view = aligned_buffer(max(1, num_bytes))[:num_bytes]
    if num_bytes:
        storage.read(name, 0, view)
    return view
