"""The system calls that a record directory is worked with, on names inside it: a port, and the real ones.

Shelves, scan and join reach files through this port alone, so that the same code runs on a simulated disk. What the
bytes mean is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["DirectoryFiles", "FileEntry", "FileStatus", "OsFiles", "read_whole"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_READ_BYTES = 1 << 20


class FileStatus(Protocol):
    """What ``os.stat_result`` says of a file, as far as it is asked here."""

    @property
    def st_mode(self) -> int: ...

    @property
    def st_size(self) -> int: ...

    @property
    def st_mtime_ns(self) -> int: ...

    @property
    def st_ino(self) -> int: ...


class FileEntry(Protocol):
    """One name of the directory; ``os.DirEntry`` is one."""

    @property
    def name(self) -> str: ...

    def inode(self) -> int: ...

    def is_file(self, *, follow_symlinks: bool) -> bool: ...

    def stat(self, *, follow_symlinks: bool) -> FileStatus: ...


class DirectoryFiles(Protocol):
    """Files of one open directory. Every call blocks for the file system and raises OSError as the kernel would.

    Names have no directory part; a descriptor belongs to the caller until it is closed. Thread-safe.
    """

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """A descriptor of ``name``."""
        ...

    def close(self, fd: int) -> None:
        """Give a descriptor back."""
        ...

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """Up to ``num_bytes`` from ``offset`` on; empty at the file's end."""
        ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers in order; how many bytes were read, 0 at the file's end."""
        ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write buffers in order; how many bytes were written."""
        ...

    def fstat(self, fd: int) -> FileStatus:
        """Status of an open file."""
        ...

    def lstat(self, name: str) -> FileStatus:
        """Status of a name; a symbolic link's own."""
        ...

    def ftruncate(self, fd: int, size: int) -> None:
        """Cut or extend an open file."""
        ...

    def fsync(self, fd: int) -> None:
        """Make an open file's bytes durable."""
        ...

    def fsync_directory(self) -> None:
        """Make links, renames and unlinks durable."""
        ...

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; FileExistsError where it is taken."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, replacing a file that has it."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a name."""
        ...

    def entries(self) -> list[FileEntry]:
        """Every name, in no order."""
        ...

    def will_need(self, fd: int, offset: int, num_bytes: int) -> None:
        """These bytes are about to be read."""
        ...

    def free_bytes(self) -> int:
        """Bytes that this user can still write on the file system."""
        ...

    def file_system(self) -> str:
        """Equal for directories whose files share free space, of all hosts that are up now."""
        ...

    def close_directory(self) -> None:
        """Nothing uses the directory any more."""
        ...


@dataclass(frozen=True, slots=True)
class OsFiles:
    """The real ones, relative to a descriptor of the directory: one that is moved or replaced leads nowhere else."""

    dir_fd: int

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """See the port; the same for all that follow."""
        return os.open(name, flags, mode, dir_fd=self.dir_fd)

    def close(self, fd: int) -> None:
        """``close``."""
        os.close(fd)

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """``pread``."""
        return os.pread(fd, num_bytes, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """``preadv``."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """``pwritev``."""
        return os.pwritev(fd, buffers, offset)

    def fstat(self, fd: int) -> os.stat_result:
        """``fstat``."""
        return os.fstat(fd)

    def lstat(self, name: str) -> os.stat_result:
        """``fstatat`` without following links."""
        return os.stat(name, dir_fd=self.dir_fd, follow_symlinks=False)

    def ftruncate(self, fd: int, size: int) -> None:
        """``ftruncate``."""
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        """``fsync``."""
        os.fsync(fd)

    def fsync_directory(self) -> None:
        """``fsync`` of the directory."""
        os.fsync(self.dir_fd)

    def link(self, source: str, target: str) -> None:
        """``linkat``."""
        os.link(source, target, src_dir_fd=self.dir_fd, dst_dir_fd=self.dir_fd, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        """``renameat``."""
        os.rename(source, target, src_dir_fd=self.dir_fd, dst_dir_fd=self.dir_fd)

    def unlink(self, name: str) -> None:
        """``unlinkat``."""
        os.unlink(name, dir_fd=self.dir_fd)

    def entries(self) -> list[FileEntry]:
        """``getdents``."""
        with os.scandir(self.dir_fd) as entries:
            return list(entries)

    def will_need(self, fd: int, offset: int, num_bytes: int) -> None:
        """``posix_fadvise``."""
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def free_bytes(self) -> int:
        """``fstatvfs``."""
        status = os.fstatvfs(self.dir_fd)
        return status.f_bavail * status.f_frsize

    def file_system(self) -> str:
        """The device number under the boot id."""
        return f"{_BOOT_ID.read_text().strip()}/{os.fstat(self.dir_fd).st_dev}"

    def close_directory(self) -> None:
        """``close`` of the directory."""
        os.close(self.dir_fd)


def read_whole(files: DirectoryFiles, fd: int, max_bytes: int) -> bytes:
    """An open file's bytes up to its end, ``max_bytes`` at most. Raises OSError."""
    parts: list[bytes] = []
    at = 0
    while at < max_bytes and (part := files.pread(fd, min(max_bytes - at, _READ_BYTES), at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)
