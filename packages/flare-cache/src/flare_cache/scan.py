"""What a rank's record directory holds: every header read and judged, or taken from ``join.idx`` where that holds.

Reads, and changes nothing. Which of the records stay is agreed between ranks by the join.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flare_cache.directory import RECORD_NAME, RecordDirectory
from flare_cache.directory_files import DirectoryFiles, FileEntry, FileStatus
from flare_cache.header_columns import sound_headers
from flare_cache.join_index import JoinIndex, read_join_index, write_join_index
from flare_cache.record import (
    BLOCK_BYTES,
    Problem,
    RecordError,
    RecordHeader,
    check_header,
    claimed_set,
    decode_header,
    header_length,
)
from flare_cache.record_file import errno_name, open_flags
from flare_cache.record_table import RecordTable, ScannedRecord, big_endian_words, find_digests
from flare_core.geometry import Geometry

__all__ = ["OwnFile", "Scan", "save_join_index", "scan_directory"]

_KEY_DIGITS = 64
_CHUNK = 256
_COLD_WAITS = 0.25
"""Waits a file from which on files count as cold: a cold one waits for its inode or its header, mostly both."""
_NUM_THREADS = 4
_LEFT_ALONE = {Problem.NEWER_FORMAT, Problem.OTHER_SET}

_Entries = Sequence[FileEntry]


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

    records: RecordTable
    damaged: list[OwnFile]
    left: list[OwnFile]
    num_hinted: int = 0


def _record_entries(directory: RecordDirectory) -> list[FileEntry]:
    """Every record name, in inode order: so cold inodes and headers are read nearly in sequence."""
    own = [entry for entry in directory.files.entries() if RECORD_NAME.fullmatch(entry.name)]
    own.sort(key=lambda entry: entry.inode())
    return own


def _keys_of(entries: _Entries) -> bytes:
    """32 bytes an entry."""
    return bytes.fromhex("".join([entry.name[:_KEY_DIGITS] for entry in entries]))


def scan_directory(
    directory: RecordDirectory, *, geometry: Geometry, set_fingerprint: bytes, with_token_ids: bool
) -> Scan:
    """Judge every record file of the directory and charge it. Blocks: some 12 µs a record, plus the disk's time.

    Raises:
        OSError: the directory itself cannot be read.
    """
    entries = _record_entries(directory)
    hints = read_join_index(directory.files, set_fingerprint=set_fingerprint, geometry=geometry)
    hinted, unknown, sizes = _take_hints(hints, entries, with_token_ids=with_token_ids)
    scanner = _Scanner(directory.files, geometry, set_fingerprint, with_token_ids)
    damaged: list[OwnFile] = []
    left: list[OwnFile] = []
    tables = [hinted]
    for chunk in _judge_all(scanner, unknown):
        sizes |= chunk.sizes
        tables.append(chunk.records)
        for unusable in chunk.unusable:
            (left if unusable.leave else damaged).append(unusable.file)
    directory.charge_all(sizes)
    found = RecordTable.joined(tables)
    place = find_digests(found.keys, hints.records.keys)
    order = np.lexsort((*big_endian_words(found.keys), np.where(place < 0, len(hints.records), place)))
    return Scan(found.taken(order), damaged, left, len(hinted))


def _take_hints(
    hints: JoinIndex, entries: _Entries, *, with_token_ids: bool
) -> tuple[RecordTable, list[FileEntry], dict[str, int]]:
    """Records that need not be opened, the files that do, and the sizes of the former."""
    if with_token_ids and not hints.has_token_ids:
        hints = JoinIndex.empty()
    place = find_digests(_keys_of(entries), hints.records.keys)
    known = np.flatnonzero(place >= 0)
    holds = (_facts_of([entries[at] for at in known.tolist()]) == hints.files[place[known]]).all(axis=1)
    known = known[holds]
    is_unknown = np.ones(len(entries), dtype=bool)
    is_unknown[known] = False
    file_sizes = hints.files[place[known], 0].tolist()
    sizes = {entries[at].name: size for at, size in zip(known.tolist(), file_sizes, strict=True)}
    records = hints.records.taken(place[known])
    if not with_token_ids:
        records = replace(records, token_ids=[b""] * len(records))
    return records, [entries[at] for at in np.flatnonzero(is_unknown).tolist()], sizes


@dataclass(frozen=True, slots=True)
class _Unusable:
    """``leave``: it may be another's, and is not to be touched."""

    file: OwnFile
    leave: bool


@dataclass(frozen=True, slots=True)
class _Judged:
    """What became of some files: size of each by name, the sound records, and the others."""

    sizes: dict[str, int]
    records: RecordTable
    unusable: list[_Unusable]


def _judge_all(scanner: _Scanner, entries: _Entries) -> Iterator[_Judged]:
    """Threads hide the latency of cold files; warm ones are judged faster by one, which the first files tell.

    By how often they made this thread wait, not by the time they took: that says as much about other processes.
    """
    chunks = [entries[at : at + _CHUNK] for at in range(0, len(entries), _CHUNK)]
    if not chunks:
        return
    before = _num_waits()
    yield scanner.judge_some(chunks.pop(0))
    is_cold = _num_waits() - before >= _COLD_WAITS * _CHUNK
    if not is_cold:
        yield from map(scanner.judge_some, chunks)
        return
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="flare-scan") as pool:
        yield from pool.map(scanner.judge_some, chunks)


def _num_waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@dataclass(frozen=True, slots=True)
class _Scanner:
    files: DirectoryFiles
    geometry: Geometry
    set_fingerprint: bytes
    with_token_ids: bool

    def judge_some(self, entries: _Entries) -> _Judged:
        """Judge some hundred files: most at once by their first blocks, the others one by one."""
        blocks = bytearray(len(entries) * BLOCK_BYTES)
        file_sizes = [self._read_block(entry, blocks, at * BLOCK_BYTES) for at, entry in enumerate(entries)]
        places, records = sound_headers(
            np.frombuffer(blocks, dtype=np.uint8).reshape(-1, BLOCK_BYTES),
            keys=_keys_of(entries),
            file_sizes=np.array(file_sizes, dtype=np.int64),
            geometry=self.geometry,
            set_fingerprint=self.set_fingerprint,
            with_token_ids=self.with_token_ids,
        )
        sizes = {entries[at].name: file_sizes[at] for at in places.tolist()}
        singles: list[ScannedRecord] = []
        unusable: list[_Unusable] = []
        for at in sorted(set(range(len(entries))).difference(places.tolist())):
            sizes[entries[at].name], result = self._judge(entries[at])
            if isinstance(result, ScannedRecord):
                singles.append(result)
            else:
                unusable.append(result)
        return _Judged(sizes, RecordTable.joined([records, RecordTable.of(singles)]), unusable)

    def _read_block(self, entry: FileEntry, blocks: bytearray, at: int) -> int:
        """The file's first block into ``blocks`` at that offset, and its size; -1 where it has none to be read."""
        if not entry.is_file(follow_symlinks=False):
            return -1
        try:
            fd = self.files.open(entry.name, _OPEN_FLAGS)
            try:
                # A status of the open file costs a third of one by name.
                size = self.files.fstat(fd).st_size
                is_whole = self.files.preadv(fd, [memoryview(blocks)[at : at + BLOCK_BYTES]], 0) == BLOCK_BYTES
            finally:
                self.files.close(fd)
        except OSError:
            return -1
        return size if is_whole else -1

    def _judge(self, entry: FileEntry) -> tuple[int, ScannedRecord | _Unusable]:
        """Open one file and say what it is, and how large."""
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
        """Size and header."""
        try:
            fd = self.files.open(name, _OPEN_FLAGS)
            try:
                size = self.files.fstat(fd).st_size
                first = self.files.pread(fd, BLOCK_BYTES, 0)
                with contextlib.suppress(RecordError):  # the decoder says what is wrong with such a length
                    if (length := header_length(first)) > len(first):
                        first = self.files.pread(fd, length, 0)
                return size, first
            finally:
                self.files.close(fd)
        except OSError as error:
            raise RecordError(Problem.READ_ERROR, errno_name(error)) from error

    def _sound(self, header: RecordHeader, name: str, size: int) -> ScannedRecord:
        if header.identity.key.hex() != name[:_KEY_DIGITS]:
            raise RecordError(Problem.OTHER_RECORD, f"the file holds {header.identity.key.hex()}")
        layout = header.layout
        legal = layout.legal_size(size)
        if legal is None:
            raise RecordError(Problem.TRUNCATED, f"{size} bytes, its pages end at {layout.pages_end}")
        return ScannedRecord(
            identity=header.identity,
            invariant_digest=header.invariant_digest,
            size=legal,
            has_tail=layout.has_tail and legal >= layout.tail_end,
            has_row=layout.has_row and legal >= layout.row_end,
            token_ids=header.token_ids if self.with_token_ids else b"",
        )


_OPEN_FLAGS = os.O_RDONLY | open_flags(direct=False)


def _status(entry: FileEntry) -> FileStatus | None:
    """None: it went meanwhile."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _facts_of(entries: _Entries) -> NDArray[np.int64]:
    """N x 3: what hints are held against, size, modification time in ns and inode; -1 for what is no file."""
    facts = [
        (-1, -1, -1)
        if (status := _status(entry)) is None or not stat.S_ISREG(status.st_mode)
        else (status.st_size, status.st_mtime_ns, status.st_ino)
        for entry in entries
    ]
    return np.array(facts, dtype=np.int64).reshape(-1, 3)


def save_join_index(
    directory: RecordDirectory, records: RecordTable, *, geometry: Geometry, set_fingerprint: bytes
) -> None:
    """Write ``join.idx`` for ``records``, given oldest use first; files that are gone are left out.

    Called on a clean exit, when no job runs any more.

    Raises:
        OSError: it could not be written; the next scan opens the headers.
    """
    entries = _record_entries(directory)
    facts = _facts_of(entries)
    place = find_digests(records.keys, _keys_of(entries))
    there = np.flatnonzero(place >= 0)
    there = there[facts[place[there], 0] >= 0]
    write_join_index(
        directory.files,
        records.taken(there),
        facts[place[there]],
        set_fingerprint=set_fingerprint,
        layout_fingerprint=geometry.layout_fingerprint,
    )
