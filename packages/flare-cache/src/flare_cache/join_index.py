"""``join.idx``: what a scan would find, written on a clean exit so that the next one need not open every header.

A hint only. An entry counts while name, size, modification time and inode are what they were; headers are checked
again before a record is used; a damaged or foreign file is as good as none. It also keeps the order of use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence

import msgspec

from flare_cache.jobs import RecordIdentity

__all__ = ["JOIN_INDEX_NAME", "JOIN_INDEX_TEMPORARY_NAME", "JoinEntry", "read_join_index", "write_join_index"]

JOIN_INDEX_NAME = "join.idx"
JOIN_INDEX_TEMPORARY_NAME = "join.idx.tmp"
_MAGIC = b"FLAREIDX1"
_SHA256_BYTES = 32
_MAX_BYTES = 4 << 30


class JoinEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record, in the order of use (oldest first).

    Attributes:
        size, mtime_ns, inode: of the file when the entry was written.
        identity, invariant_digest, token_ids: from its header; ``token_ids`` is empty where they were not kept.
    """

    size: int
    mtime_ns: int
    inode: int
    identity: RecordIdentity
    invariant_digest: bytes
    token_ids: bytes


class _Content(msgspec.Struct, frozen=True, array_like=True):
    set_fingerprint: bytes
    layout_fingerprint: bytes
    entries: list[JoinEntry]


def write_join_index(
    dir_fd: int, entries: Sequence[JoinEntry], *, set_fingerprint: bytes, layout_fingerprint: bytes
) -> None:
    """Replace ``join.idx``. Raises OSError; then nothing or the old one is left."""
    data = msgspec.msgpack.encode(_Content(set_fingerprint, layout_fingerprint, list(entries)))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(JOIN_INDEX_TEMPORARY_NAME, flags, 0o600, dir_fd=dir_fd)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_MAGIC)
            file.write(hashlib.sha256(data).digest())
            file.write(data)
        os.rename(JOIN_INDEX_TEMPORARY_NAME, JOIN_INDEX_NAME, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(JOIN_INDEX_TEMPORARY_NAME, dir_fd=dir_fd)
        raise


def read_join_index(dir_fd: int, *, set_fingerprint: bytes, layout_fingerprint: bytes) -> list[JoinEntry]:
    """The entries of a whole ``join.idx`` of this set and layout; empty in every other case."""
    try:
        fd = os.open(JOIN_INDEX_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError:
        return []
    at = len(_MAGIC) + _SHA256_BYTES
    payload = memoryview(data)[at:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(payload).digest() != data[len(_MAGIC) : at]:
        return []
    try:
        content = msgspec.msgpack.decode(payload, type=_Content)
    except msgspec.DecodeError:
        return []
    if (content.set_fingerprint, content.layout_fingerprint) != (set_fingerprint, layout_fingerprint):
        return []
    return content.entries
