"""The pool's objects in a local directory: one file each, written under another name first, durable before they count.

The directory belongs to one manager (``LOCK``); it is private, for it holds users' prompts. A failed fsync is never
repeated: what was written is removed, and nothing more is stored until the manager is started again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flare_cache.pool.storage import StoredObject
from flare_core.errors import UsageError

__all__ = ["LocalStorage", "open_local_storage"]

_BLOCK = 4096
_CALL_BYTES = 8 << 20
_TEMPORARY = "tmp"


@dataclass(slots=True)
class LocalStorage:
    """Made by :func:`open_local_storage`; a :class:`flare_cache.pool.storage.PoolStorage`.

    Attributes:
        root: the directory.
        direct: files are written with O_DIRECT where they are whole blocks.
        stopped: why nothing is stored any more.
    """

    root: Path
    direct: bool
    stopped: str | None = None
    _lock: int = -1
    _serial: Iterator[int] = field(default_factory=itertools.count)
    _durable: set[Path] = field(default_factory=set)

    def begin(self, name: str, num_bytes: int) -> LocalUpload:
        """See the port. Bytes go to a temporary file as they come."""
        target = self._path(name)
        direct = self.direct and not num_bytes % _BLOCK
        return LocalUpload(self, target, *self._create(num_bytes, direct=direct))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See the port. A link, unlike a rename, replaces nothing."""
        target = self._path(name)
        if target.exists():
            return False
        temporary = self._write(data)
        try:
            self._make_directory(target.parent)
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            _remove(temporary)
        self._sync_directory(target.parent)
        return True

    def read(self, name: str, offset: int, view: memoryview) -> None:
        """See the port."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path(name), flags)
        try:
            done = 0
            while done < len(view):
                got = os.preadv(fd, [view[done : done + _CALL_BYTES]], offset + done)
                if not got:
                    raise OSError(errno.EIO, f"{name} ends at {offset + done}")
                done += got
        finally:
            os.close(fd)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """See the port. A file that goes meanwhile is left out."""
        for directory, _, names in os.walk(self.root / prefix.rpartition("/")[0]):
            for file in names:
                path = Path(directory, file)
                name = str(path.relative_to(self.root))
                if not name.startswith(prefix):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    yield StoredObject(name, status.st_size, status.st_mtime)

    def delete(self, names: Sequence[str]) -> None:
        """See the port."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._path(name).unlink()

    def close(self) -> None:
        """Give the directory back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ValueError(f"{name!r} is no object name")
        return self.root.joinpath(*parts)

    def _create(self, num_bytes: int, *, direct: bool) -> tuple[Path, int]:
        """A temporary file with its room reserved, open for writing."""
        if self.stopped is not None:
            raise OSError(errno.EIO, self.stopped)
        path = self.root / _TEMPORARY / f"{os.getpid()}.{next(self._serial)}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)
        except BaseException:
            os.close(fd)
            _remove(path)
            raise
        return path, fd

    def _write(self, data: bytes) -> Path:
        """The bytes in a temporary file, synced."""
        path, fd = self._create(len(data), direct=False)
        try:
            write_all(fd, memoryview(data), 0)
            self._sync(fd)
        except BaseException:
            _remove(path)
            raise
        finally:
            os.close(fd)
        return path

    def _sync(self, fd: int) -> None:
        try:
            os.fsync(fd)
        except OSError as error:
            # The kernel has dropped what it could not write: a second fsync would succeed and lie.
            self.stopped = self.stopped or f"fsync failed: {error.strerror}; nothing is stored until the next start"
            raise

    def _sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._sync(fd)
        finally:
            os.close(fd)

    def _make_directory(self, path: Path) -> None:
        """The directory with its parents, each durable in its own; that one is there may be of a manager that died."""
        if path == self.root or path in self._durable:
            return
        self._make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        self._sync_directory(path.parent)
        self._durable.add(path)


@dataclass(slots=True)
class LocalUpload:
    """See :class:`flare_cache.pool.storage.Upload`."""

    storage: LocalStorage
    target: Path
    temporary: Path
    fd: int
    _num_writers: int = 0
    _is_ended: bool = False
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def write(self, offset: int, view: memoryview) -> None:
        """Write at once: the disk works while the rest is on its way. Raises OSError once it has ended."""
        with self._mutex:
            if self._is_ended:
                raise OSError(errno.ECANCELED, "given up while it was received")
            self._num_writers += 1
        try:
            write_all(self.fd, view, offset)
        finally:
            with self._mutex:
                self._num_writers -= 1
                self._close_if_unused()

    def commit(self, data: memoryview) -> None:
        """Sync the file, give it its name, sync the directory."""
        del data
        storage = self.storage
        try:
            storage._sync(self.fd)
            storage._make_directory(self.target.parent)
            self.temporary.rename(self.target)
        except BaseException:
            self.abort()
            raise
        self._close()
        storage._sync_directory(self.target.parent)

    def abort(self) -> None:
        """Close and remove."""
        self._close()
        _remove(self.temporary)

    def _close(self) -> None:
        with self._mutex:
            self._is_ended = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        # The number of a closed descriptor is soon another file's: none is closed under a writer.
        if self._is_ended and not self._num_writers and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def write_all(fd: int, view: memoryview, offset: int) -> None:
    """Write all of ``view``. Raises OSError."""
    done = 0
    while done < len(view):
        done += os.pwritev(fd, [view[done : done + _CALL_BYTES]], offset + done)


def open_local_storage(root: Path) -> LocalStorage:
    """Take the directory, which is made if it is not there; what an earlier manager left unfinished is removed.

    Raises:
        UsageError: it cannot be made or written, is open to others, or another manager has it.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
        if status.st_mode & 0o077:
            raise UsageError(
                f"--store {root} is open to other users (mode {status.st_mode & 0o777:04o}): chmod 700 {root}"
            )
        lock = os.open(root / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--store {root}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary = root / _TEMPORARY
        temporary.mkdir(mode=0o700, exist_ok=True)
        for left in temporary.iterdir():
            left.unlink()
        direct = _takes_direct(temporary)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(
            f"--store {root} is used by another manager; give each its own directory, or one bucket"
        ) from None
    except OSError as error:
        os.close(lock)
        raise UsageError(f"--store {root} cannot be written: {error.strerror}") from error
    return LocalStorage(root, direct, _lock=lock)


def _takes_direct(directory: Path) -> bool:
    path = directory / f"probe.{os.getpid()}"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        _remove(path)
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
