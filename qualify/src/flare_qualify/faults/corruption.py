"""Record files damaged at rest, in every way that a disk, a copying mistake or another version of flare could.

Each kind of damage is a function from the file's bytes, decoded far enough to be precise, to other bytes. What must
follow is said with it. A change that leaves size, times and inode as they were is not seen by a start that trusts
``join.idx``; then all of it must be found when the record is read.
"""

from __future__ import annotations

import enum
import hashlib
import os
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from flare_cache.record import (
    BOUND,
    BOUND_ALIGNMENT,
    INVARIANT,
    PREFIX,
    SHA256_BYTES,
    TOKENS_AT,
    FileLayout,
    RecordHeader,
    decode_header,
)
from flare_core.geometry import align_up

__all__ = [
    "DAMAGES",
    "Consequence",
    "Damaged",
    "RecordBytes",
    "damage_file",
    "make_foreign_names",
    "overwrite",
    "read_record",
    "swap_first_pages",
]

_SECTOR_BYTES = 512
_FORMAT_AT = 8
_STORE_ID_AT = 80
_READER = range(10, 12)
_SET = range(PREFIX.size, PREFIX.size + 32)


class Consequence(enum.StrEnum):
    """What must become of a damaged file."""

    REMOVED_AT_JOIN = "removed at the join"
    FOUND_WHEN_READ = "found when read"
    SHORTENED = "kept up to a boundary"
    LEFT_ALONE = "left alone"
    HARMLESS = "nothing that is read has changed"


@dataclass(frozen=True, slots=True)
class RecordBytes:
    """A record's file: all of its bytes and its header, decoded."""

    data: bytes
    header: RecordHeader

    @property
    def layout(self) -> FileLayout:
        """Where its sections lie."""
        return self.header.layout

    @property
    def bound_at(self) -> int:
        """Where the rank-bound part of the header begins."""
        num_tokens = self.header.identity.end - self.header.identity.start
        return align_up(TOKENS_AT + 4 * num_tokens, BOUND_ALIGNMENT)

    @property
    def table(self) -> range:
        """Positions of the digest table."""
        start = self.bound_at + BOUND.size
        return range(start, start + len(self.header.digests))


@dataclass(frozen=True, slots=True)
class Damaged:
    """New contents of a file, what was done in words, and what must follow."""

    data: bytes
    what: str
    consequence: Consequence


Damage = Callable[[RecordBytes, random.Random], Damaged | None]
"""None where the record has nothing that this kind of damage could hit (no tail, no row)."""


def read_record(path: Path) -> RecordBytes:
    """The record in ``path``. Raises RecordError for a header that is not sound."""
    data = path.read_bytes()
    return RecordBytes(data, decode_header(data))


def damage_file(path: Path, damage: Damage, rng: random.Random) -> Damaged | None:
    """Damage the record in ``path`` where it lies, keeping its inode, its name and its times."""
    damaged = damage(read_record(path), rng)
    if damaged is not None:
        overwrite(path, damaged.data)
    return damaged


def overwrite(path: Path, data: bytes) -> None:
    """Other contents for a file, with its inode and times kept: as a disk would change it."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def swap_first_pages(one: Path, other: Path) -> str:
    """The first page of each record in the other's place; of two records of one rank, or of two ranks; in words."""
    first, second = read_record(one), read_record(other)
    size = min(first.layout.page_bytes, second.layout.page_bytes)
    at, there = first.layout.header_bytes, second.layout.header_bytes
    overwrite(one, first.data[:at] + second.data[there : there + size] + first.data[at + size :])
    overwrite(other, second.data[:there] + first.data[at : at + size] + second.data[there + size :])
    return f"first pages of {one.parent.name}/{one.name[:8]} and {other.parent.name}/{other.name[:8]} swapped"


def make_foreign_names(directory: Path) -> dict[str, int]:
    """Names in a record directory that are not flare's, some of them nearly; name and inode of each."""
    digits = "0123456789abcdef" * 4
    (directory / "notes.txt").write_text("not a record\n")
    (directory / f"{digits}.rec.bak").write_bytes(b"FLAREREC")
    (directory / f"{digits.upper()}.rec").write_bytes(b"FLAREREC")
    (directory / f"{digits[:-1]}.rec").write_bytes(b"")
    (directory / "lost+found").mkdir(exist_ok=True)
    (directory / f"{digits}.rec").mkdir()
    os.mkfifo(directory / f"{digits[::-1]}.rec")
    (directory / f"{'0' * 64}.rec").symlink_to("/etc/hostname")
    names = ["notes.txt", f"{digits}.rec.bak", f"{digits.upper()}.rec", f"{digits[:-1]}.rec", "lost+found"]
    names += [f"{digits}.rec", f"{digits[::-1]}.rec", f"{'0' * 64}.rec"]
    return {name: (directory / name).lstat().st_ino for name in names}


def _flip(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :]


def _flipped(record: RecordBytes, at: int, rng: random.Random, where: str, consequence: Consequence) -> Damaged:
    bit = rng.randrange(8)
    return Damaged(_flip(record.data, at, bit), f"bit {bit} of byte {at} ({where})", consequence)


def _resealed(record: RecordBytes, at: int, new: bytes) -> bytes:
    """The file with ``new`` in its header at ``at`` and a right SHA-256 behind it."""
    length = record.layout.header_bytes
    header = bytearray(record.data[:length])
    header[at : at + len(new)] = new
    header[-SHA256_BYTES:] = hashlib.sha256(memoryview(header)[:-SHA256_BYTES]).digest()
    return bytes(header) + record.data[length:]


def flip_fixed_fields(record: RecordBytes, rng: random.Random) -> Damaged:
    """A bit of the fields that every header has, but for those that say whose file it is and who may read it."""
    own = [at for at in range(INVARIANT.size) if at not in _READER and at not in _SET]
    return _flipped(record, rng.choice(own), rng, "header fields", Consequence.REMOVED_AT_JOIN)


def flip_set(record: RecordBytes, rng: random.Random) -> Damaged:
    """A bit of the set fingerprint: nothing proves any more that the file is this set's to remove."""
    return _flipped(record, rng.choice(_SET), rng, "set fingerprint", Consequence.LEFT_ALONE)


def flip_tokens(record: RecordBytes, rng: random.Random) -> Damaged:
    """A bit of the token ids."""
    at = rng.randrange(TOKENS_AT, TOKENS_AT + len(record.header.token_ids))
    return _flipped(record, at, rng, "token ids", Consequence.REMOVED_AT_JOIN)


def flip_bound_part(record: RecordBytes, rng: random.Random) -> Damaged:
    """A bit of the offsets and lengths."""
    at = rng.randrange(record.bound_at, record.bound_at + BOUND.size)
    return _flipped(record, at, rng, "rank-bound fields", Consequence.REMOVED_AT_JOIN)


def flip_table(record: RecordBytes, rng: random.Random) -> Damaged:
    """A bit of the digest table; the header's SHA-256 then is wrong."""
    return _flipped(record, rng.choice(record.table), rng, "digest table", Consequence.REMOVED_AT_JOIN)


def flip_table_resealed(record: RecordBytes, rng: random.Random) -> Damaged:
    """A bit of a page's digest, under a right SHA-256, as a mistake of memory before writing would leave it."""
    at = rng.choice(record.table[: 16 * record.layout.num_pages] or record.table)
    new = bytes((record.data[at] ^ 1 << rng.randrange(8),))
    return Damaged(_resealed(record, at, new), f"byte {at} of the digest table, resealed", Consequence.FOUND_WHEN_READ)


def flip_header_digest(record: RecordBytes, rng: random.Random) -> Damaged:
    """A bit of the header's own SHA-256."""
    at = record.layout.header_bytes - 1 - rng.randrange(SHA256_BYTES)
    return _flipped(record, at, rng, "header digest", Consequence.REMOVED_AT_JOIN)


def flip_page(record: RecordBytes, rng: random.Random) -> Damaged:
    """A bit of a whole page, its padding included."""
    at = rng.randrange(record.layout.header_bytes, record.layout.pages_end)
    return _flipped(record, at, rng, "pages", Consequence.FOUND_WHEN_READ)


def flip_tail(record: RecordBytes, rng: random.Random) -> Damaged | None:
    """A bit of the tail."""
    layout = record.layout
    if not layout.has_tail or len(record.data) < layout.tail_end:
        return None
    return _flipped(record, rng.randrange(layout.pages_end, layout.tail_end), rng, "tail", Consequence.FOUND_WHEN_READ)


def flip_row(record: RecordBytes, rng: random.Random) -> Damaged | None:
    """A bit of the row."""
    layout = record.layout
    if not layout.has_row or len(record.data) < layout.row_end:
        return None
    return _flipped(record, rng.randrange(layout.tail_end, layout.row_end), rng, "row", Consequence.FOUND_WHEN_READ)


def zero_sector(record: RecordBytes, rng: random.Random) -> Damaged:
    """A sector of the pages that reads as zeros, as one that was never written."""
    layout = record.layout
    filled = [
        at
        for at in range(layout.header_bytes, layout.pages_end, _SECTOR_BYTES)
        if any(record.data[at : at + _SECTOR_BYTES])
    ]
    at = rng.choice(filled)
    data = record.data[:at] + bytes(_SECTOR_BYTES) + record.data[at + _SECTOR_BYTES :]
    return Damaged(data, f"zeros in the sector at {at}", Consequence.FOUND_WHEN_READ)


def swap_pages(record: RecordBytes, rng: random.Random) -> Damaged | None:
    """Two pages in each other's place."""
    layout = record.layout
    if layout.num_pages < 2:
        return None
    one, other = sorted(rng.sample(range(layout.num_pages), 2))
    first, second = (record.data[layout.section_offset(i) :][: layout.page_bytes] for i in (one, other))
    data = bytearray(record.data)
    data[layout.section_offset(one) : layout.section_offset(one) + layout.page_bytes] = second
    data[layout.section_offset(other) : layout.section_offset(other) + layout.page_bytes] = first
    return Damaged(bytes(data), f"pages {one} and {other} swapped", Consequence.FOUND_WHEN_READ)


def other_store_id(record: RecordBytes, rng: random.Random) -> Damaged:
    """Sound, but of another store than on the other ranks."""
    data = _resealed(record, _STORE_ID_AT, rng.randbytes(16))
    return Damaged(data, "another store id, resealed", Consequence.REMOVED_AT_JOIN)


def cut_header(record: RecordBytes, rng: random.Random) -> Damaged:
    """The file ends inside its header, or is empty."""
    size = rng.choice((0, 1, PREFIX.size - 1, PREFIX.size, _SECTOR_BYTES, record.layout.header_bytes - 1))
    return Damaged(record.data[:size], f"cut to {size} bytes, in the header", Consequence.REMOVED_AT_JOIN)


def cut_pages(record: RecordBytes, rng: random.Random) -> Damaged:
    """The file ends inside its pages, at a boundary of a page or of a sector or between them."""
    layout = record.layout
    page = layout.section_offset(rng.randrange(layout.num_pages))
    size = rng.choice((page, page + _SECTOR_BYTES, layout.pages_end - 1, layout.header_bytes))
    return Damaged(record.data[:size], f"cut to {size} bytes, in the pages", Consequence.REMOVED_AT_JOIN)


def cut_tail(record: RecordBytes, rng: random.Random) -> Damaged | None:
    """The file ends inside its tail, or just before it."""
    layout = record.layout
    if not layout.has_tail:
        return None
    size = rng.choice((layout.pages_end, layout.pages_end + 1, layout.tail_end - 1))
    return Damaged(record.data[:size], f"cut to {size} bytes, in the tail", Consequence.SHORTENED)


def cut_row(record: RecordBytes, rng: random.Random) -> Damaged | None:
    """The file ends inside its row, or just before it."""
    layout = record.layout
    if not layout.has_row:
        return None
    size = rng.choice((layout.tail_end, layout.tail_end + 1, layout.row_end - 1))
    return Damaged(record.data[:size], f"cut to {size} bytes, in the row", Consequence.SHORTENED)


def grow(record: RecordBytes, rng: random.Random) -> Damaged:
    """Bytes behind the end that the header names."""
    return Damaged(record.data + rng.randbytes(4096), "4096 bytes too many", Consequence.HARMLESS)


def newer_format(record: RecordBytes, rng: random.Random) -> Damaged:
    """A file whose oldest reader is newer than this version."""
    new = struct.pack("<HH", rng.randrange(2, 1000), rng.randrange(2, 1000))
    return Damaged(_resealed(record, _FORMAT_AT, new), f"format and reader {new.hex()}", Consequence.LEFT_ALONE)


def other_set(record: RecordBytes, rng: random.Random) -> Damaged:
    """A sound file of another record set."""
    return Damaged(_resealed(record, _SET.start, rng.randbytes(32)), "of another set, resealed", Consequence.LEFT_ALONE)


DAMAGES: Mapping[str, Damage] = MappingProxyType(
    {
        "fixed-fields": flip_fixed_fields,
        "set-fingerprint": flip_set,
        "token-ids": flip_tokens,
        "bound-part": flip_bound_part,
        "table": flip_table,
        "table-resealed": flip_table_resealed,
        "header-digest": flip_header_digest,
        "page": flip_page,
        "tail": flip_tail,
        "row": flip_row,
        "zero-sector": zero_sector,
        "swapped-pages": swap_pages,
        "other-store-id": other_store_id,
        "cut-header": cut_header,
        "cut-pages": cut_pages,
        "cut-tail": cut_tail,
        "cut-row": cut_row,
        "too-long": grow,
        "newer-format": newer_format,
        "other-set": other_set,
    }
)
"""Every kind of damage to one file, by name."""
