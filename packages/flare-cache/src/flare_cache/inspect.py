"""Looking into a record directory without an engine, and without its lock: list, show, verify; and remove with it.

Reads what any rank wrote, by the header's own numbers, since the geometry is not known here. A server may be at work
meanwhile: a file that goes away between two looks is simply gone. Gives plain data; printing is the command line's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flare_cache.digest import DIGEST_BYTES, ROW_INDEX, section_digest
from flare_cache.directory import RECORD_NAME, RecordDirectory
from flare_cache.directory_files import OsFiles
from flare_cache.directory_lock import LockHolder, current_holder
from flare_cache.host_memory import aligned_buffer
from flare_cache.record import Problem, RecordError, RecordHeader
from flare_cache.record_file import errno_name, open_flags, read_header, read_sections
from flare_cache.set_file import SetFile, read_set_file
from flare_core.errors import UsageError

__all__ = [
    "Listing",
    "RecordSummary",
    "Removal",
    "UnusableFile",
    "Verdict",
    "find_record",
    "list_records",
    "remove_records",
    "verify_records",
]

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RecordSummary:
    """A record with a sound header.

    Attributes:
        name, size: of the file.
        depth: records above it that are in the same directory.
        orphan: it names a parent that is not there.
        has_tail, has_row: what is left after truncation.
        header: all that its header says.
    """

    name: str
    size: int
    depth: int
    orphan: bool
    has_tail: bool
    has_row: bool
    header: RecordHeader


@dataclass(frozen=True, slots=True)
class UnusableFile:
    """A file with a record's name and no sound header; ``problem`` and ``reason`` say why."""

    name: str
    size: int
    problem: Problem
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory's contents.

    Attributes:
        path: the directory.
        set_file: its ``set.json``, None before the first join.
        holder: the process that works in it now.
        records: parents before children, a parent's children behind it; siblings by key.
        unusable: damaged, of a newer format, or misnamed.
    """

    path: Path
    set_file: SetFile | None
    holder: LockHolder | None
    records: tuple[RecordSummary, ...]
    unusable: tuple[UnusableFile, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files listed."""
        return sum(record.size for record in self.records) + sum(file.size for file in self.unusable)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One record verified; ``reason`` is None where every digest was right."""

    name: str
    num_bytes: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Removal:
    """What was unlinked, children before parents."""

    names: tuple[str, ...]
    num_bytes: int


def list_records(path: Path) -> Listing:
    """Read every header. Blocks for the disk; takes no lock.

    Raises:
        UsageError: no directory, or a ``set.json`` that cannot be read.
    """
    dir_fd = _open_directory(path)
    try:
        set_file = read_set_file(OsFiles(dir_fd), str(path))
        holder = current_holder(dir_fd)
        headers: dict[bytes, tuple[RecordHeader, int]] = {}
        unusable: list[UnusableFile] = []
        with os.scandir(dir_fd) as entries:
            names = sorted(entry.name for entry in entries if RECORD_NAME.fullmatch(entry.name))
        for name in names:
            try:
                header, size = _read(dir_fd, name)
            except RecordError as error:
                if error.problem is not Problem.MISSING:
                    unusable.append(UnusableFile(name, _size(dir_fd, name), error.problem, str(error)))
            else:
                headers[header.identity.key] = (header, size)
    finally:
        os.close(dir_fd)
    return Listing(path, set_file, holder, tuple(_in_tree_order(headers)), tuple(unusable))


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened as a directory: {error.strerror}") from error


def _open_record(dir_fd: int, name: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | open_flags(direct=False), dir_fd=dir_fd)
    except FileNotFoundError as error:
        raise RecordError(Problem.MISSING, name) from error
    except OSError as error:
        raise RecordError(Problem.READ_ERROR, errno_name(error)) from error


def _read(dir_fd: int, name: str) -> tuple[RecordHeader, int]:
    fd = _open_record(dir_fd, name)
    try:
        header, size = read_header(OsFiles(dir_fd), fd), os.fstat(fd).st_size
    finally:
        os.close(fd)
    if header.identity.key.hex() != name[:64]:
        raise RecordError(Problem.OTHER_RECORD, f"the file holds {header.identity.key.hex()}")
    if header.layout.legal_size(size) is None:
        raise RecordError(Problem.TRUNCATED, f"{size} bytes, its pages end at {header.layout.pages_end}")
    return header, size


def _size(dir_fd: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _in_tree_order(headers: dict[bytes, tuple[RecordHeader, int]]) -> Iterator[RecordSummary]:
    children: dict[bytes, list[bytes]] = {}
    for key, (header, _) in headers.items():
        parent = header.identity.parent_key
        children.setdefault(parent if parent in headers else b"", []).append(key)
    pending = [(key, 0) for key in reversed(children.get(b"", []))]
    while pending:
        key, depth = pending.pop()
        header, size = headers[key]
        layout, parent = header.layout, header.identity.parent_key
        yield RecordSummary(
            name=f"{key.hex()}.rec",
            size=size,
            depth=depth,
            orphan=bool(parent) and parent not in headers,
            has_tail=layout.has_tail and size >= layout.tail_end,
            has_row=layout.has_row and size >= layout.row_end,
            header=header,
        )
        pending.extend((child, depth + 1) for child in reversed(children.get(key, [])))


def find_record(listing: Listing, prefix: str) -> RecordSummary:
    """The record whose key begins with ``prefix`` (hexadecimal, any unambiguous length).

    Raises:
        UsageError: none, or several.
    """
    found = [record for record in listing.records if record.name.startswith(prefix.lower())]
    if len(found) != 1:
        raise UsageError(f"{len(found)} records in {listing.path} have a key that begins with {prefix!r}")
    return found[0]


@dataclass(slots=True)
class _Reader:
    """Reads sections in pieces of bounded size, whatever length a header claims."""

    files: OsFiles
    fd: int
    header: RecordHeader
    buffer: memoryview = field(default_factory=lambda: aligned_buffer(_CHUNK_BYTES))

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes at ``offset``; each piece is valid until the next."""
        while length:
            piece = self.buffer[: min(length, len(self.buffer))]
            read_sections(self.files, self.fd, views=[piece], offset=offset)
            yield piece
            offset, length = offset + len(piece), length - len(piece)

    def check(self, index: int, position: int, *, offset: int, length: int) -> None:
        """Raises RecordError where the section's digest is not the header's."""
        header = self.header
        found = section_digest(header.identity.store_id, header.rank, index=index, payload=self.pieces(offset, length))
        if found != header.digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]:
            name = "the row" if index == ROW_INDEX else f"section {index}"
            raise RecordError(Problem.SECTION_DIGEST, name)


def verify_records(
    listing: Listing, *, progress: Callable[[str, int], None], records: Sequence[RecordSummary] | None = None
) -> list[Verdict]:
    """Check every digest of ``records`` (default: all of them), and name the unusable files as bad.

    ``progress(name, num_bytes)`` is called after each record with the bytes it has. Blocks for the disk.
    """
    verdicts = [] if records is not None else [Verdict(f.name, f.size, f.reason) for f in listing.unusable]
    dir_fd = _open_directory(listing.path)
    try:
        for record in listing.records if records is None else records:
            reason = None
            try:
                _verify(dir_fd, record)
            except RecordError as error:
                reason = str(error)
            verdicts.append(Verdict(record.name, record.size, reason))
            progress(record.name, record.size)
    finally:
        os.close(dir_fd)
    return verdicts


def _verify(dir_fd: int, record: RecordSummary) -> None:
    fd = _open_record(dir_fd, record.name)
    try:
        files = OsFiles(dir_fd)
        header = read_header(files, fd)
        layout = header.layout
        reader = _Reader(files, fd, header)
        for index in range(layout.num_pages + record.has_tail):
            reader.check(index, index, offset=layout.section_offset(index), length=layout.page_bytes)
        if record.has_row:
            length = layout.row_end - layout.tail_end
            reader.check(ROW_INDEX, layout.num_digests - 1, offset=layout.tail_end, length=length)
    finally:
        os.close(fd)


def remove_records(path: Path, prefixes: Sequence[str]) -> Removal:
    """Unlink the records whose names begin with these prefixes, and all that extend them; unusable files too.

    Takes the directory's lock. The other ranks drop the same records at the next join.

    Raises:
        UsageError: a server works in the directory, or a prefix fits no file or several.
    """
    directory = RecordDirectory.open(path, lock_timeout_seconds=0.0)
    try:
        listing = list_records(path)
        doomed: dict[str, int] = {}
        for prefix in prefixes:
            unusable = [file for file in listing.unusable if file.name.startswith(prefix.lower())]
            if len(unusable) == 1:
                doomed[unusable[0].name] = unusable[0].size
            else:
                doomed.update(_subtree(listing, find_record(listing, prefix)))
        names = tuple(reversed(doomed))
        for name in names:
            directory.remove(name)
        return Removal(names, sum(doomed.values()))
    except OSError as error:
        raise UsageError(f"{path}: a record cannot be removed: {error.strerror}") from error
    finally:
        directory.close()


def _subtree(listing: Listing, top: RecordSummary) -> dict[str, int]:
    """Names and sizes of ``top`` and all below it, parents first."""
    start = listing.records.index(top)
    found = {top.name: top.size}
    for record in listing.records[start + 1 :]:
        if record.depth <= top.depth:
            break
        found[record.name] = record.size
    return found
