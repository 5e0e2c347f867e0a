"""What a rank's record directory holds: every header read and judged, or taken from ``join.idx`` where that holds.

Reads, and changes nothing. Which of the records stay is agreed between ranks by the join.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from flare_cache.directory import RECORD_NAME, RecordDirectory
from flare_cache.jobs import RecordIdentity
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

_CHUNK = 256
_COLD_SECONDS = 60e-6
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


class _Names(msgspec.Struct, frozen=True, gc=False):
    """One record name and its status."""

    name: str
    size: int
    mtime_ns: int
    inode: int
    is_file: bool


def _record_names(directory: RecordDirectory) -> list[_Names]:
    with os.scandir(directory.dir_fd) as entries:
        own = [entry for entry in entries if RECORD_NAME.fullmatch(entry.name)]
        # In inode order, cold inodes and headers are read nearly in sequence; a directory lists them in hash order.
        own.sort(key=os.DirEntry.inode)
        found: list[_Names] = []
        for entry in own:
            status = entry.stat(follow_symlinks=False)
            is_file = stat.S_ISREG(status.st_mode)
            found.append(_Names(entry.name, status.st_size, status.st_mtime_ns, status.st_ino, is_file))
    return found


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
    names = _record_names(directory)
    records: list[ScannedRecord] = []
    damaged: list[OwnFile] = []
    left: list[OwnFile] = []
    unknown: list[_Names] = []
    directory.charge_all({found.name: found.size for found in names})
    for found in names:
        entry = hints.get(bytes.fromhex(found.name[:64]))
        record = scanner.from_hint(entry, found) if entry is not None else None
        if record is None:
            unknown.append(found)
        else:
            records.append(record)
    num_hinted = len(records)
    for result in _judge_all(scanner, unknown):
        match result:
            case ScannedRecord():
                records.append(result)
            case (file, True):
                left.append(file)
            case (file, False):
                damaged.append(file)
    last = len(order)
    records.sort(key=lambda record: (order.get(record.identity.key, last), record.identity.key))
    return Scan(records, damaged, left, num_hinted)


def _hints(directory: RecordDirectory, geometry: Geometry, set_fingerprint: bytes) -> dict[bytes, JoinEntry]:
    entries = read_join_index(
        directory.dir_fd, set_fingerprint=set_fingerprint, layout_fingerprint=geometry.layout_fingerprint
    )
    return {entry.identity.key: entry for entry in entries}


_Judged = ScannedRecord | tuple[OwnFile, bool]


def _judge_all(scanner: _Scanner, names: Sequence[_Names]) -> Iterator[_Judged]:
    """Threads hide the latency of cold files; warm ones are judged faster by one, which the first files tell."""
    start = time.perf_counter()
    yield from [scanner.judge(found) for found in names[:_CHUNK]]
    rest = names[_CHUNK:]
    if time.perf_counter() - start < _COLD_SECONDS * _CHUNK:
        yield from map(scanner.judge, rest)
        return
    chunks = [rest[at : at + _CHUNK] for at in range(0, len(rest), _CHUNK)]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="flare-scan") as pool:
        for judged in pool.map(lambda chunk: [scanner.judge(found) for found in chunk], chunks):
            yield from judged


@dataclass(frozen=True, slots=True)
class _Scanner:
    dir_fd: int
    geometry: Geometry
    set_fingerprint: bytes
    with_token_ids: bool

    def from_hint(self, entry: JoinEntry, found: _Names) -> ScannedRecord | None:
        """The record without opening it, or None where the hint does not hold."""
        if (entry.size, entry.mtime_ns, entry.inode) != (found.size, found.mtime_ns, found.inode):
            return None
        if self.with_token_ids and not entry.token_ids:
            return None
        identity = entry.identity
        layout = file_layout(identity, page_bytes=self.geometry.page_bytes, row_stride=self.geometry.row_stride)
        return self._record(identity, layout, digest=entry.invariant_digest, size=found.size, token_ids=entry.token_ids)

    def judge(self, found: _Names) -> _Judged:
        """Open the file and say what it is; the flag of a file that is no record: leave it alone."""
        first = b""
        try:
            if not found.is_file:
                raise RecordError(Problem.NOT_A_RECORD, "no regular file")
            first = self._read(found.name)
            header = decode_header(first)
            check_header(header, set_fingerprint=self.set_fingerprint, geometry=self.geometry)
            return self._sound(header, found)
        except RecordError as error:
            problem, reason = error.problem, str(error)
        # A damaged header that names another set is not proven to be ours to remove.
        foreign = problem is Problem.HEADER_DIGEST and claimed_set(first) != self.set_fingerprint
        return OwnFile(found.name, found.size, reason), foreign or problem in _LEFT_ALONE or not found.is_file

    def _read(self, name: str) -> bytes:
        try:
            fd = os.open(name, os.O_RDONLY | open_flags(direct=False), dir_fd=self.dir_fd)
            try:
                first = os.pread(fd, BLOCK_BYTES, 0)
                length = header_length(first)
                return first if length <= len(first) else os.pread(fd, length, 0)
            finally:
                os.close(fd)
        except OSError as error:
            raise RecordError(Problem.READ_ERROR, errno_name(error)) from error

    def _sound(self, header: RecordHeader, found: _Names) -> ScannedRecord:
        if header.identity.key.hex() != found.name[:64]:
            raise RecordError(Problem.OTHER_RECORD, f"the file holds {header.identity.key.hex()}")
        record = self._record(
            header.identity,
            header.layout,
            digest=header.invariant_digest,
            size=found.size,
            token_ids=header.token_ids,
        )
        if record is None:
            raise RecordError(Problem.TRUNCATED, f"{found.size} bytes, its pages end at {header.layout.pages_end}")
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


def save_join_index(
    directory: RecordDirectory, records: Sequence[ScannedRecord], *, geometry: Geometry, set_fingerprint: bytes
) -> None:
    """Write ``join.idx`` for ``records``, given oldest use first; files that are gone are left out.

    Called on a clean exit, when no job runs any more.

    Raises:
        OSError: it could not be written; the next scan opens the headers.
    """
    status = {found.name: found for found in _record_names(directory) if found.is_file}
    entries: list[JoinEntry] = []
    for record in records:
        found = status.get(f"{record.identity.key.hex()}.rec")
        if found is not None:
            entries.append(
                JoinEntry(
                    found.size,
                    found.mtime_ns,
                    found.inode,
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
