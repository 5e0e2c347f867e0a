"""What the pool's manager keeps objects in, in a simulated world: lasting, whole or absent, and damaged on purpose."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flare_cache.pool.manifest import Manifest, ObjectKind, decode_manifest, parse_name
from flare_cache.pool.storage import StoredObject

__all__ = ["SimStorage"]


@dataclass(slots=True)
class SimStorage:
    """A ``PoolStorage``.

    Attributes:
        objects: bytes by name. damaged: names of objects that were changed behind the manager's back.
        committed: keys of all records that have ever been visible.
        is_full: it takes nothing.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    committed: set[bytes] = field(default_factory=set)
    is_full: bool = False

    def begin(self, name: str, num_bytes: int) -> _Upload:
        """See the port, as for all that follow."""
        del num_bytes
        return _Upload(self, name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """A manifest."""
        if name in self.objects:
            return False
        self.write(name, data)
        found = parse_name(name)
        if found is not None and found.kind is ObjectKind.MANIFEST:
            self.committed.add(found.key)
        return True

    def write(self, name: str, data: bytes) -> None:
        """All of it. Raises OSError."""
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space left in the pool's storage")
        self.objects[name] = data
        self.damaged.discard(name)

    def read(self, name: str, offset: int, view: memoryview) -> None:
        """A part of an object."""
        data = self.objects.get(name)
        if data is None:
            raise FileNotFoundError(name)
        if offset + len(view) > len(data):
            raise OSError(errno.EIO, f"{name} ends before")
        view[:] = data[offset : offset + len(view)]

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """In the order of names."""
        for name in sorted(self.objects):
            if name.startswith(prefix):
                yield StoredObject(name, len(self.objects[name]), 0.0)

    def delete(self, names: Sequence[str]) -> None:
        """Those that are there."""
        for name in names:
            self.objects.pop(name, None)
            self.damaged.discard(name)

    def manifests(self) -> Sequence[Manifest]:
        """Everything visible, by name."""
        return [
            decode_manifest(data)
            for name, data in sorted(self.objects.items())
            if (found := parse_name(name)) is not None and found.kind is ObjectKind.MANIFEST
        ]

    def shard_names(self) -> Sequence[str]:
        """Of every shard."""
        return [
            name
            for name in sorted(self.objects)
            if (found := parse_name(name)) is not None and found.kind is ObjectKind.SHARD
        ]


@dataclass(slots=True)
class _Upload:
    storage: SimStorage
    name: str

    def write(self, offset: int, view: memoryview) -> None:
        """Nothing is kept before all has come."""

    def commit(self, data: memoryview) -> None:
        self.storage.write(self.name, bytes(data))

    def abort(self) -> None:
        """Nothing is there."""
