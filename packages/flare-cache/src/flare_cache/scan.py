"""What a rank's record directory holds: every header read and judged, or taken from ``join.idx`` where that holds.

Reads, and changes nothing. Which of the records stay is agreed between ranks by the join.
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from flare_cache.directory import RECORD_NAME, RecordDirectory
from flare_cache.jobs import RecordIdentity, record_file_name
from flare_cache.join_index import JoinEntry, read_join_index, write_join_index
from flare_cache.record import (
    BLOCK_BYTES,
    FileLayout,
    Problem,
    RecordError,
    RecordHeader,
    check_header,
    claimed_set,
    decode_header,
    file_layout,
    header_length,
)
from flare_cache.record_file import errno_name, open_flags
from flare_core.geometry import Geometry

__all__ = ["OwnFile", "Scan", "ScannedRecord", "save_join_index", "scan_directory"]

_KEY_DIGITS = 64
_CHUNK = 256
_COLD_WAITS = 0.25
"""Waits a file from which on files count as cold: a cold one waits for its inode or its header, mostly both."""
_NUM_THREADS = 4
_LEFT_ALONE = {Problem.NEWER_FORMAT, Problem.OTHER_SET}


class ScannedRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A sound record of this set, rank and layout (its pages are verified when they are used).

    Attributes:
        identity: as stored; a truncation does not change it.
        invariant_digest: SHA-256 of the rank-invariant header: equal on ranks that hold the same store's shards.
        size: the file's legal size; what lies behind it is dropped by the next truncation.
        has_tail, has_row: what is there after truncation.
        token_ids: u32 little endian; empty unless asked for.
    """

    identity: RecordIdentity
    invariant_digest: bytes
    size: int
    has_tail: bool
    has_row: bool
    token_ids: bytes = b""


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file with a record's name that is not usable as one; ``reason`` says why."""

    name: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Scan:
    """What was found.

    Attributes:
        records: oldest use first, as far as the last clean exit knew it; later ones behind, by key.
        damaged: to be unlinked: unreadable, truncated, flipped, misnamed, or another rank's.
        left: of a newer format or another set: charged, listed, never touched.
        num_hinted: records taken from ``join.idx`` without opening them.
    """

    records: list[ScannedRecord]
    damaged: list[OwnFile]
    left: list[OwnFile]
    num_hinted: int = 0


def _record_entries(directory: RecordDirectory) -> list[os.DirEntry[str]]:
    """Every record name, in inode order: so cold inodes and headers are read nearly in sequence."""
    with os.scandir(directory.dir_fd) as entries:
        own = [entry for entry in entries if RECORD_NAME.fullmatch(entry.name)]
    own.sort(key=os.DirEntry.inode)
    return own


def scan_directory(
    directory: RecordDirectory, *, geometry: Geometry, set_fingerprint: bytes, with_token_ids: bool
) -> Scan:
    """Judge every record file of the directory and charge it. Blocks: some 20 µs a record, plus the disk's time.

    Raises:
        OSError: the directory itself cannot be read.
    """
    hints = _hints(directory, geometry, set_fingerprint)
    order = {key: position for position, key in enumerate(hints)}
    scanner = _Scanner(directory.dir_fd, geometry, set_fingerprint, with_token_ids)
    records: list[ScannedRecord] = []
    damaged: list[OwnFile] = []
    left: list[OwnFile] = []
    sizes: dict[str, int] = {}
    unknown: list[os.DirEntry[str]] = []
    for entry in _record_entries(directory):
        hint = hints.get(bytes.fromhex(entry.name[:_KEY_DIGITS]))
        record = scanner.from_hint(hint, entry) if hint is not None else None
        if hint is None or record is None:
            unknown.append(entry)
        else:
            sizes[entry.name] = hint.size
            records.append(record)
    num_hinted = len(records)
    for entry, (size, result) in zip(unknown, _judge_all(scanner, unknown), strict=True):
        sizes[entry.name] = size
        match result:
            case ScannedRecord():
                records.append(result)
            case _Unusable(file, leave=True):
                left.append(file)
            case _Unusable(file):
                damaged.append(file)
    directory.charge_all(sizes)
    last = len(order)
    records.sort(key=lambda record: (order.get(record.identity.key, last), record.identity.key))
    return Scan(records, damaged, left, num_hinted)


def _hints(directory: RecordDirectory, geometry: Geometry, set_fingerprint: bytes) -> dict[bytes, JoinEntry]:
    entries = read_join_index(
        directory.dir_fd, set_fingerprint=set_fingerprint, layout_fingerprint=geometry.layout_fingerprint
    )
    return {entry.identity.key: entry for entry in entries}


@dataclass(frozen=True, slots=True)
class _Unusable:
    """``leave``: it may be another's, and is not to be touched."""

    file: OwnFile
    leave: bool


_Judged = tuple[int, ScannedRecord | _Unusable]
"""The file's size, and what it is."""


def _judge_all(scanner: _Scanner, entries: Sequence[os.DirEntry[str]]) -> Iterator[_Judged]:
    """Threads hide the latency of cold files; warm ones are judged faster by one, which the first files tell.

    By how often they made this thread wait, not by the time they took: that says as much about other processes.
    """
    before = _num_waits()
    yield from [scanner.judge(entry) for entry in entries[:_CHUNK]]
    rest = entries[_CHUNK:]
    if _num_waits() - before < _COLD_WAITS * _CHUNK:
        yield from map(scanner.judge, rest)
        return
    chunks = [rest[at : at + _CHUNK] for at in range(0, len(rest), _CHUNK)]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="flare-scan") as pool:
        for judged in pool.map(lambda chunk: [scanner.judge(entry) for entry in chunk], chunks):
            yield from judged


def _num_waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@dataclass(frozen=True, slots=True)
class _Scanner:
    dir_fd: int
    geometry: Geometry
    set_fingerprint: bytes
    with_token_ids: bool

    def from_hint(self, hint: JoinEntry, entry: os.DirEntry[str]) -> ScannedRecord | None:
        """The record without opening it, or None where the hint does not hold."""
        status = _status(entry)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        if (hint.size, hint.mtime_ns, hint.inode) != (status.st_size, status.st_mtime_ns, status.st_ino):
            return None
        if self.with_token_ids and not hint.token_ids:
            return None
        identity = hint.identity
        layout = file_layout(identity, page_bytes=self.geometry.page_bytes, row_stride=self.geometry.row_stride)
        return self._record(identity, layout, digest=hint.invariant_digest, size=hint.size, token_ids=hint.token_ids)

    def judge(self, entry: os.DirEntry[str]) -> _Judged:
        """Open the file and say what it is."""
        first = b""
        is_file = entry.is_file(follow_symlinks=False)
        try:
            if not is_file:
                raise RecordError(Problem.NOT_A_RECORD, "no regular file")
            size, first = self._read(entry.name)
            header = decode_header(first)
            check_header(header, set_fingerprint=self.set_fingerprint, geometry=self.geometry)
            return size, self._sound(header, entry.name, size)
        except RecordError as error:
            problem, reason = error.problem, str(error)
        # A damaged header that names another set is not proven to be ours to remove.
        foreign = problem is Problem.HEADER_DIGEST and claimed_set(first) != self.set_fingerprint
        status = _status(entry)
        size = status.st_size if status is not None else 0
        return size, _Unusable(OwnFile(entry.name, size, reason), foreign or problem in _LEFT_ALONE or not is_file)

    def _read(self, name: str) -> tuple[int, bytes]:
        """Size and header. A status of the open file costs a third of one by name."""
        try:
            fd = os.open(name, os.O_RDONLY | open_flags(direct=False), dir_fd=self.dir_fd)
            try:
                size = os.fstat(fd).st_size
                first = os.pread(fd, BLOCK_BYTES, 0)
                length = header_length(first)
                return size, first if length <= len(first) else os.pread(fd, length, 0)
            finally:
                os.close(fd)
        except OSError as error:
            raise RecordError(Problem.READ_ERROR, errno_name(error)) from error

    def _sound(self, header: RecordHeader, name: str, size: int) -> ScannedRecord:
        if header.identity.key.hex() != name[:_KEY_DIGITS]:
            raise RecordError(Problem.OTHER_RECORD, f"the file holds {header.identity.key.hex()}")
        record = self._record(
            header.identity,
            header.layout,
            digest=header.invariant_digest,
            size=size,
            token_ids=header.token_ids,
        )
        if record is None:
            raise RecordError(Problem.TRUNCATED, f"{size} bytes, its pages end at {header.layout.pages_end}")
        return record

    def _record(
        self, identity: RecordIdentity, layout: FileLayout, *, digest: bytes, size: int, token_ids: bytes
    ) -> ScannedRecord | None:
        legal = layout.legal_size(size)
        if legal is None:
            return None
        return ScannedRecord(
            identity=identity,
            invariant_digest=digest,
            size=legal,
            has_tail=layout.has_tail and legal >= layout.tail_end,
            has_row=layout.has_row and legal >= layout.row_end,
            token_ids=token_ids if self.with_token_ids else b"",
        )


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """None: it went meanwhile."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def save_join_index(
    directory: RecordDirectory, records: Sequence[ScannedRecord], *, geometry: Geometry, set_fingerprint: bytes
) -> None:
    """Write ``join.idx`` for ``records``, given oldest use first; files that are gone are left out.

    Called on a clean exit, when no job runs any more.

    Raises:
        OSError: it could not be written; the next scan opens the headers.
    """
    there = {entry.name: _status(entry) for entry in _record_entries(directory)}
    entries: list[JoinEntry] = []
    for record in records:
        status = there.get(record_file_name(record.identity.key))
        if status is not None and stat.S_ISREG(status.st_mode):
            entries.append(
                JoinEntry(
                    status.st_size,
                    status.st_mtime_ns,
                    status.st_ino,
                    record.identity,
                    record.invariant_digest,
                    record.token_ids,
                )
            )
    write_join_index(
        directory.dir_fd,
        entries,
        set_fingerprint=set_fingerprint,
        layout_fingerprint=geometry.layout_fingerprint,
    )
