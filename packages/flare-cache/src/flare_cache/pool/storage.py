"""The port to what the pool's manager keeps objects in: a directory, or an object store. Five methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["PoolStorage", "StoredObject", "Upload"]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as listed. ``modified_at``: Unix seconds."""

    name: str
    num_bytes: int
    modified_at: float


class Upload(Protocol):
    """An object on its way. Blocks and raises OSError as storage does."""

    def write(self, offset: int, view: memoryview) -> None:
        """Some bytes of it have come; from any thread, in any order, each once.

        Whole blocks of 4096 bytes but for the last, at an address of such a block.
        """
        ...

    def commit(self, data: memoryview) -> None:
        """All have come, ``data``: it is durable, and whole for every reader, when this returns."""
        ...

    def abort(self) -> None:
        """Nothing of it stays. Does not raise."""
        ...


class PoolStorage(Protocol):
    """Objects by name (``a/b/c``). Thread-safe; every call blocks and raises OSError where the storage fails."""

    def begin(self, name: str, num_bytes: int) -> Upload:
        """Begin to write an object, which will replace another of that name."""
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
