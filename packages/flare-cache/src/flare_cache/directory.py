"""The record directory of one rank: a private directory, its lock, and what may be done to the names in it.

Every path below is a name inside the directory, opened without following links (:mod:`flare_cache.directory_files`);
a directory that is moved or replaced later cannot lead a write elsewhere. Foreign names are never touched. What the
files hold is the codec's business, which records are wanted is rank zero's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from flare_cache.directory_files import DirectoryFiles, OsFiles
from flare_cache.directory_lock import acquire_lock
from flare_cache.join_index import JOIN_INDEX_TEMPORARY_NAME
from flare_cache.record import Problem, RecordError
from flare_cache.record_file import errno_name, open_flags
from flare_cache.set_file import SET_TEMPORARY_NAME, SetFile, read_set_file, write_set_file
from flare_core.errors import UsageError
from flare_transport.failpoint import failpoint

__all__ = ["LOCK_TIMEOUT_SECONDS", "RECORD_NAME", "TEMPORARY_NAME", "RecordDirectory", "open_private", "temporary_name"]

LOCK_TIMEOUT_SECONDS = 15.0
RECORD_NAME = re.compile(r"[0-9a-f]{64}\.rec")
TEMPORARY_NAME = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")

_DAMAGE = {errno.EIO, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EUCLEAN, errno.EBADMSG}


def temporary_name(key: bytes, store_id: bytes) -> str:
    """Name of a record's file while it is written: of no other store, and recognised as flare's after a crash."""
    return f"{key.hex()}.{store_id.hex()}.tmp"


def _is_temporary(name: str) -> bool:
    return TEMPORARY_NAME.fullmatch(name) is not None or name in (SET_TEMPORARY_NAME, JOIN_INDEX_TEMPORARY_NAME)


def open_private(path: Path) -> int:
    """A descriptor of an existing directory that only this user can enter.

    Raises:
        UsageError: missing, a symbolic link, no directory, another user's, or open to group or others.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise UsageError(f"{path} is a symbolic link: give the directory itself") from error
        raise UsageError(f"{path} cannot be opened as a directory: {error.strerror}") from error
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    problem = None
    if status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, this process runs as {os.geteuid()}: give a directory of its own"
    elif mode & 0o077:
        problem = f"has mode {mode:04o}; records are users' prompts: chmod 700 {path}"
    if problem is not None:
        os.close(fd)
        raise UsageError(f"{path} {problem}")
    return fd


@dataclass(slots=True)
class RecordDirectory:
    """An open, locked record directory. Thread-safe; calls block for the file system.

    Attributes:
        path: for messages only.
        files: of the directory; closed by :meth:`close`.
        lock_fd: held until then.
        stores_stopped: why nothing is stored here any more (a failed fsync), or None.
    """

    path: Path
    files: DirectoryFiles
    lock_fd: int
    stores_stopped: str | None = None
    _sizes: dict[str, int] = field(default_factory=dict)
    _charged: int = 0
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _syncing: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: Path, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Self:
        """Create the directory if need be (mode 0700), check that it is private, lock it, sweep temporaries.

        Waits up to ``lock_timeout_seconds`` for another holder.

        Raises:
            UsageError: it cannot be created or written, is not private, or is in use; names the remedy.
        """
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except FileNotFoundError as error:
            raise UsageError(f"{path} cannot be created: {path.parent} does not exist") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be created: {error.strerror}") from error
        dir_fd = open_private(path)
        try:
            lock_fd = acquire_lock(dir_fd, str(path), timeout_seconds=lock_timeout_seconds)
        except OSError as error:
            os.close(dir_fd)
            raise UsageError(
                f"{path} cannot be written: {error.strerror}: give a directory that this user can write"
            ) from error
        except BaseException:
            os.close(dir_fd)
            raise
        directory = cls(path=path, files=OsFiles(dir_fd), lock_fd=lock_fd)
        try:
            directory.sweep_temporaries()
        except OSError as error:
            directory.close()
            raise UsageError(f"{path}: a temporary file cannot be removed: {error.strerror}") from error
        return directory

    @property
    def dir_fd(self) -> int:
        """Descriptor of the directory, where its files are the system's."""
        if not isinstance(self.files, OsFiles):
            raise TypeError(f"{self.path} is no directory of this system")
        return self.files.dir_fd

    def sweep_temporaries(self) -> None:
        """Remove what an earlier process had begun; once, before anything else. Raises OSError."""
        for name in [entry.name for entry in self.files.entries() if _is_temporary(entry.name)]:
            self.files.unlink(name)

    def close(self) -> None:
        """Give the lock back. Nothing may use the directory afterwards."""
        self.files.close(self.lock_fd)
        self.files.close_directory()

    def read_set(self) -> SetFile | None:
        """See :func:`flare_cache.set_file.read_set_file`."""
        return read_set_file(self.files, str(self.path))

    def adopt(self, content: SetFile) -> None:
        """Write ``set.json``: from now on the directory belongs to this rank of this set.

        Raises:
            UsageError: it could not be written.
        """
        try:
            write_set_file(self.files, content)
        except OSError as error:
            raise UsageError(f"{self.path}/set.json cannot be written: {error.strerror}") from error

    def open_record(self, name: str, *, direct: bool, writable: bool = False) -> int:
        """A descriptor of an existing record file.

        Raises:
            RecordError: MISSING, READ_ERROR, or NOT_A_RECORD for what is no regular file.
            OSError: this process cannot open files; the record may be sound.
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | open_flags(direct=direct)
        try:
            fd = self.files.open(name, flags)
        except FileNotFoundError as error:
            raise RecordError(Problem.MISSING, name) from error
        except OSError as error:
            if error.errno not in _DAMAGE:
                raise
            raise RecordError(Problem.READ_ERROR, f"{errno_name(error)} on opening {name}") from error
        if not stat.S_ISREG(self.files.fstat(fd).st_mode):
            self.files.close(fd)
            raise RecordError(Problem.NOT_A_RECORD, f"{name} is no regular file")
        return fd

    def create_temporary(self, name: str, *, direct: bool, num_bytes: int) -> int:
        """A new file (mode 0600) of that name, charged with ``num_bytes`` from now on.

        Raises:
            OSError: it exists, or the file system refuses.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | open_flags(direct=direct)
        fd = self.files.open(name, flags, 0o600)
        self.charge(name, num_bytes)
        return fd

    def publish(self, temporary: str, name: str) -> None:
        """Give a finished temporary its final name without replacing a file of that name.

        Raises:
            OSError: FileExistsError among them; either name may exist then.
        """
        # link and unlink rather than renameat2: the same effect through calls that every file system and Python have.
        failpoint("store.link")
        self.files.link(temporary, name)
        failpoint("store.unlink-temporary")
        self.files.unlink(temporary)
        failpoint("store.published")
        with self._mutex:
            self._sizes[name] = self._sizes.pop(temporary, 0)

    def remove(self, name: str) -> int:
        """Unlink ``name``; the bytes that it was charged with. A missing file is removed already.

        Raises:
            OSError: it is still there.
        """
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(name)
        return self.charge(name, 0)

    def truncate(self, name: str, size: int) -> int:
        """Cut a record file to ``size`` bytes if it is longer; the bytes given back.

        Raises:
            RecordError: it cannot be opened.
            OSError: it was not cut.
        """
        fd = self.open_record(name, direct=False, writable=True)
        try:
            before = self.files.fstat(fd).st_size
            if before > size:
                failpoint("truncate.cut")
                self.files.ftruncate(fd, size)
        finally:
            self.files.close(fd)
        self.charge(name, min(before, size))
        return max(0, before - size)

    def sync(self) -> None:
        """Make renames and unlinks durable; one at a time, and never again once it has failed. Raises OSError."""
        with self._syncing:
            # The kernel tells each failure once for each descriptor, and this one is shared.
            if self.stores_stopped is not None:
                raise OSError(errno.EIO, self.stores_stopped)
            try:
                self.files.fsync_directory()
            except OSError as error:
                self.stores_stopped = f"fsync failed: {error.strerror}"
                raise

    def charge(self, name: str, num_bytes: int) -> int:
        """Count ``name`` with ``num_bytes`` from now on (0: no longer); what it counted before."""
        with self._mutex:
            before = self._sizes.pop(name, 0)
            if num_bytes:
                self._sizes[name] = num_bytes
            self._charged += num_bytes - before
        return before

    def charge_all(self, sizes: Mapping[str, int]) -> None:
        """:meth:`charge` for many names."""
        with self._mutex:
            known = self._sizes
            before = sum(known.get(name, 0) for name in sizes) if known else 0
            known.update(sizes)
            self._charged += sum(sizes.values()) - before

    @property
    def charged_bytes(self) -> int:
        """Bytes of all files that count against the disk limit: records, files left alone, temporaries."""
        return self._charged

    def free_bytes(self) -> int:
        """Bytes that this user can still write on the file system."""
        return self.files.free_bytes()

    def file_system(self) -> str:
        """Ranks whose directories say the same here share their free space."""
        return self.files.file_system()
