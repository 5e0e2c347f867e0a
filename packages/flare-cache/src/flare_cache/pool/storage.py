"""The port to what the pool's manager keeps objects in: a directory, or an object store. Five methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["PoolStorage", "StoredObject"]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as listed. ``modified_at``: Unix seconds."""

    name: str
    num_bytes: int
    modified_at: float


class PoolStorage(Protocol):
    """Objects by name (``a/b/c``). Thread-safe; every call blocks and raises OSError where the storage fails."""

    def put(self, name: str, data: memoryview) -> None:
        """Write a whole object, replacing another; it is durable, and whole for every reader, when this returns."""
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one of that name; False: there is. Durable when this returns."""
        ...

    def read(self, name: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on. Raises FileNotFoundError, and OSError where the object ends before."""
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose name begins with ``prefix``, in no order."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are no fault."""
        ...
