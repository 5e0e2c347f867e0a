"""Reading and writing one record's file: whole-buffer vectored I/O, headers, and the choice of O_DIRECT.

Works on descriptors. What a short read or an errno means for a record is said here; what follows from it is the
shelf's to decide.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Sequence

from flare_cache.directory_files import DirectoryFiles
from flare_cache.host_memory import aligned_buffer
from flare_cache.record import BLOCK_BYTES, Problem, RecordError, RecordHeader, decode_header, header_length
from flare_core.errors import UsageError
from flare_transport.failpoint import failpoint

__all__ = [
    "DiskTransport",
    "errno_name",
    "open_flags",
    "probe_direct",
    "read_header",
    "read_sections",
    "write_sections",
]

_IOV_MAX = 1024


class DiskTransport(enum.StrEnum):
    """How records are read and written (``--prefix-cache-disk-transport``)."""

    AUTO = "auto"
    DIRECT = "direct"
    BUFFERED = "buffered"


def open_flags(*, direct: bool) -> int:
    """Flags that every open of a record has: no symbolic link, no blocking on a pipe, not inherited."""
    return os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)


def _advance(views: list[memoryview], done: int) -> list[memoryview]:
    for at, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[at + 1 :]]
        done -= len(view)
    return []


def read_sections(files: DirectoryFiles, fd: int, *, views: Sequence[memoryview], offset: int) -> None:
    """Fill ``views`` with the bytes from ``offset`` on. Blocks for the disk.

    Raises:
        RecordError: TRUNCATED at the file's end, READ_ERROR with the errno's name.
    """
    pending, at = list(views), offset
    while pending:
        try:
            failpoint("fetch.read")
            done = files.preadv(fd, pending[:_IOV_MAX], at)
        except OSError as error:
            raise RecordError(Problem.READ_ERROR, f"{errno_name(error)} at offset {at}") from error
        if not done:
            raise RecordError(Problem.TRUNCATED, f"the file ends at {at}")
        pending, at = _advance(pending, done), at + done


def write_sections(files: DirectoryFiles, fd: int, *, views: Sequence[memoryview], offset: int) -> None:
    """Write ``views`` from ``offset`` on, whole. Blocks for the disk.

    Raises:
        OSError: what the kernel said; some of the bytes may have been written.
    """
    pending, at = list(views), offset
    while pending:
        done = files.pwritev(fd, pending[:_IOV_MAX], at)
        if not done:
            raise OSError(errno.EIO, f"nothing was written at offset {at}")
        pending, at = _advance(pending, done), at + done


def read_header(files: DirectoryFiles, fd: int, *, expected_bytes: int = BLOCK_BYTES) -> RecordHeader:
    """The verified header of an open file. ``expected_bytes``: its length if known, so that one read is enough.

    Raises:
        RecordError: any of the codec's problems, or READ_ERROR.
    """
    first = aligned_buffer(expected_bytes)
    got = _read_some(files, fd, buffer=first)
    length = header_length(first[:got])
    if got < expected_bytes or length <= got:
        return decode_header(first[:got])
    whole = aligned_buffer(length)
    return decode_header(whole[: _read_some(files, fd, buffer=whole)])


def _read_some(files: DirectoryFiles, fd: int, *, buffer: memoryview) -> int:
    """Fill ``buffer`` from the file's start as far as the file goes."""
    done = 0
    while done < len(buffer):
        try:
            got = files.preadv(fd, [buffer[done:]], done)
        except OSError as error:
            raise RecordError(Problem.READ_ERROR, f"{errno_name(error)} at offset {done}") from error
        if not got:
            break
        done += got
        if done % BLOCK_BYTES:
            break  # only the end of a file gives a part of a block; O_DIRECT could not go on from here
    return done


def errno_name(error: OSError) -> str:
    """``ENOSPC`` and the like; what reasons and metrics name a failure by."""
    return errno.errorcode.get(error.errno or 0, str(error))


def probe_direct(files: DirectoryFiles, name: str, *, transport: DiskTransport, path: str) -> bool:
    """Are records read and written with O_DIRECT? AUTO tries it on a temporary file ``name``, which is removed.

    Raises:
        UsageError: DIRECT on a file system that refuses O_DIRECT.
        OSError: the directory cannot be written.
    """
    if transport is DiskTransport.BUFFERED:
        return False
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | open_flags(direct=True)
    try:
        fd = files.open(name, flags, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        works = False
    else:
        try:
            works = _round_trip(files, fd)
        finally:
            files.close(fd)
    # An open refused with EINVAL may have created the file.
    with contextlib.suppress(FileNotFoundError):
        files.unlink(name)
    if transport is DiskTransport.DIRECT and not works:
        raise UsageError(
            f"the file system of {path} refuses O_DIRECT: use --prefix-cache-disk-transport buffered or auto"
        )
    return works


def _round_trip(files: DirectoryFiles, fd: int) -> bool:
    block = aligned_buffer(BLOCK_BYTES)
    try:
        return files.pwritev(fd, [block], 0) == BLOCK_BYTES and files.preadv(fd, [block], 0) == BLOCK_BYTES
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
