"""``join.idx``: what a scan would find, written on a clean exit so that the next one need not open every header.

A hint only. An entry counts while name, size, modification time and inode are what they were; headers are checked
again before a record is used; a damaged or foreign file is as good as none. It also keeps the order of use.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from flare_cache.directory_files import DirectoryFiles, read_whole
from flare_cache.header_columns import file_ends, has_possible_counts
from flare_cache.record import MAX_HEADER_BYTES
from flare_cache.record_table import IDENTITY, RecordTable
from flare_core.geometry import Geometry

__all__ = ["JOIN_INDEX_NAME", "JOIN_INDEX_TEMPORARY_NAME", "JoinIndex", "read_join_index", "write_join_index"]

JOIN_INDEX_NAME = "join.idx"
JOIN_INDEX_TEMPORARY_NAME = "join.idx.tmp"
_MAGIC = b"FLAREIDX2"
_SHA256_BYTES = 32
_DIGEST_BYTES = 32
_MAX_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, eq=False)
class JoinIndex:
    """What the file says, oldest use first.

    Attributes:
        records: N records, their sizes and parts as their files' sizes imply.
        files: N x 3 int64: size, modification time in ns and inode of each file when the entry was written.
        has_token_ids: they were kept.
    """

    records: RecordTable
    files: NDArray[np.int64]
    has_token_ids: bool

    @classmethod
    def empty(cls) -> Self:
        """No hint."""
        return cls(RecordTable.of(()), np.empty((0, 3), dtype=np.int64), has_token_ids=False)


class _Content(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    set_fingerprint: bytes
    layout_fingerprint: bytes
    identities: bytes
    digests: bytes
    files: bytes
    token_ids: bytes


def write_join_index(
    directory: DirectoryFiles,
    records: RecordTable,
    files: NDArray[np.int64],
    *,
    set_fingerprint: bytes,
    layout_fingerprint: bytes,
) -> None:
    """Replace ``join.idx``; arguments as the attributes of :class:`JoinIndex`.

    Token ids are kept where every record has them. Raises OSError; then nothing or the old one is left.
    """
    token_ids = b"".join(records.token_ids) if all(records.token_ids) else b""
    content = _Content(
        set_fingerprint,
        layout_fingerprint,
        records.identities.tobytes(),
        records.digests.tobytes(),
        files.astype("<i8").tobytes(),
        token_ids,
    )
    data = msgspec.msgpack.encode(content)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = directory.open(JOIN_INDEX_TEMPORARY_NAME, flags, 0o600)
    try:
        try:
            _write_all(directory, fd, b"".join((_MAGIC, hashlib.sha256(data).digest(), data)))
        finally:
            directory.close(fd)
        directory.rename(JOIN_INDEX_TEMPORARY_NAME, JOIN_INDEX_NAME)
    except OSError:
        with contextlib.suppress(OSError):
            directory.unlink(JOIN_INDEX_TEMPORARY_NAME)
        raise


def _write_all(directory: DirectoryFiles, fd: int, data: bytes) -> None:
    view = memoryview(data)
    at = 0
    while at < len(view):
        at += directory.pwritev(fd, [view[at:]], at)


def read_join_index(directory: DirectoryFiles, *, set_fingerprint: bytes, geometry: Geometry) -> JoinIndex:
    """The entries of a whole ``join.idx`` of this set and layout that can be records; none in every other case."""
    try:
        fd = directory.open(JOIN_INDEX_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            # What is no join.idx may be of any size.
            is_ours = directory.pread(fd, len(_MAGIC), 0) == _MAGIC
            data = read_whole(directory, fd, _MAX_BYTES) if is_ours else b""
        finally:
            directory.close(fd)
    except OSError:
        return JoinIndex.empty()
    at = len(_MAGIC) + _SHA256_BYTES
    payload = memoryview(data)[at:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(payload).digest() != data[len(_MAGIC) : at]:
        return JoinIndex.empty()
    try:
        content = msgspec.msgpack.decode(payload, type=_Content)
    except msgspec.DecodeError:
        return JoinIndex.empty()
    if (content.set_fingerprint, content.layout_fingerprint) != (set_fingerprint, geometry.layout_fingerprint):
        return JoinIndex.empty()
    return _index_of(content, geometry)


def _index_of(content: _Content, geometry: Geometry) -> JoinIndex:
    num_records, odd = divmod(len(content.identities), IDENTITY.itemsize)
    if odd or (len(content.digests), len(content.files)) != (_DIGEST_BYTES * num_records, 24 * num_records):
        return JoinIndex.empty()
    identities = np.frombuffer(content.identities, dtype=IDENTITY)
    if not has_possible_counts(identities, max_tokens=MAX_HEADER_BYTES // 4).all():
        return JoinIndex.empty()
    token_ends = np.cumsum(4 * (identities["end"] - identities["start"]))
    has_token_ids = num_records > 0 and len(content.token_ids) == token_ends[-1]
    token_ids = [b""] * num_records
    if has_token_ids:
        bounds = itertools.pairwise([0, *token_ends.tolist()])
        token_ids = [content.token_ids[begin:end] for begin, end in bounds]
    files = np.frombuffer(content.files, dtype="<i8").reshape(-1, 3).astype(np.int64)
    sizes, parts = file_ends(identities, geometry).parts(files[:, 0])
    records = RecordTable(identities, np.frombuffer(content.digests, dtype="V32"), sizes, parts, token_ids)
    legal = np.flatnonzero(sizes >= 0)
    return JoinIndex(records.taken(legal), files[legal], has_token_ids)
