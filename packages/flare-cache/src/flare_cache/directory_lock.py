"""``LOCK``: one process at a time works in a record directory. Held with flock for the process's life.

The file names its holder for the message that the next one gets; the lock itself is the kernel's and ends with the
process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time

import msgspec

from flare_core.errors import UsageError

__all__ = ["LOCK_FILE_NAME", "LockHolder", "acquire_lock", "current_holder"]

LOCK_FILE_NAME = "LOCK"
_RETRY_SECONDS = 0.05
_MAX_BYTES = 4096


class LockHolder(msgspec.Struct, frozen=True):
    """Who wrote ``LOCK`` last."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def acquire_lock(dir_fd: int, path: str, *, timeout_seconds: float) -> int:
    """Take the directory's lock, waiting for its holder; the descriptor is the lock.

    Raises:
        UsageError: still held after ``timeout_seconds``; names the holder.
        OSError: ``LOCK`` could not be opened or written.
    """
    fd = os.open(LOCK_FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        deadline = time.monotonic() + timeout_seconds
        while not _try_lock(fd, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise UsageError(
                    f"{path} is in use by {_read_holder(fd) or 'another process'}: "
                    "stop it, or give this rank a directory of its own"
                )
            time.sleep(_RETRY_SECONDS)
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(LockHolder(os.getpid(), socket.gethostname())) + b"\n", 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def current_holder(dir_fd: int) -> LockHolder | None:
    """Who holds the lock now; None: nobody. Does not wait and changes nothing."""
    try:
        fd = os.open(LOCK_FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
    except OSError:
        return None
    try:
        if _try_lock(fd, fcntl.LOCK_SH):
            return None
        return _read_holder(fd) or LockHolder(0, "an unknown host")
    finally:
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(fd: int) -> LockHolder | None:
    try:
        return msgspec.json.decode(os.pread(fd, _MAX_BYTES, 0), type=LockHolder)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
