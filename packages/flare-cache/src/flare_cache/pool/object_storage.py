"""The pool's objects in an object store (S3, GCS, Azure, a local directory, memory), through ``obstore``.

Needs the extra ``flare-cache[object-store]``. Several managers may use one store: a manifest is put only if absent,
which the store itself decides. An object is durable when the store has acknowledged it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError

from flare_cache.pool.storage import StoredObject

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["ObjectStorage"]

_DELETES_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class _ObjectUpload:
    """An object that is sent when all of it has come."""

    store: ObjectStore
    name: str

    def write(self, offset: int, view: memoryview) -> None:
        """The whole is sent later."""

    def commit(self, data: memoryview) -> None:
        """Send it; large ones go in parts."""
        try:
            obstore.put(self.store, self.name, data)
        except BaseError as error:
            raise _fault(self.name, error) from error

    def abort(self) -> None:
        """Nothing was sent."""


@dataclass(frozen=True, slots=True)
class ObjectStorage:
    """A :class:`flare_cache.pool.storage.PoolStorage` on ``store``, which has the place's prefix already."""

    store: ObjectStore

    def begin(self, name: str, num_bytes: int) -> _ObjectUpload:
        """See the port."""
        del num_bytes
        return _ObjectUpload(self.store, name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See the port. A conditional put; the store decides between managers."""
        try:
            obstore.put(self.store, name, data, mode="create")
        except AlreadyExistsError:
            return False
        except BaseError as error:
            raise _fault(name, error) from error
        return True

    def read(self, name: str, offset: int, view: memoryview) -> None:
        """See the port."""
        try:
            found = obstore.get_range(self.store, name, start=offset, length=len(view))
        except (NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(name) from error
        except BaseError as error:
            raise _fault(name, error) from error
        data = memoryview(found)
        if len(data) != len(view):
            raise OSError(f"{name} ends at {offset + len(data)}")
        view[:] = data

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """See the port."""
        directory, _, rest = prefix.rpartition("/")
        try:
            for batch in obstore.list(self.store, prefix=directory):
                for found in batch:
                    name = found["path"]
                    if not rest or name.startswith(prefix):
                        yield StoredObject(name, found["size"], found["last_modified"].timestamp())
        except BaseError as error:
            raise _fault(prefix, error) from error

    def delete(self, names: Sequence[str]) -> None:
        """See the port."""
        for at in range(0, len(names), _DELETES_AT_ONCE):
            for name in names[at : at + _DELETES_AT_ONCE]:
                try:
                    obstore.delete(self.store, name)
                except (NotFoundError, FileNotFoundError):
                    continue
                except BaseError as error:
                    raise _fault(name, error) from error


def _fault(name: str, error: BaseError) -> OSError:
    """The fault in one line: clients of object stores append pages of their insides."""
    return OSError(f"{name}: {str(error).partition(chr(10))[0]}")
