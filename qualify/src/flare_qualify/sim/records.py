"""What the simulated disks hold, read by the checkers: identities, sizes and bytes of record files, and whether they
are what they should be. Uses the real codec, and no machine's view.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import xxhash

from flare_cache.digest import ROW_INDEX
from flare_cache.jobs import RecordIdentity
from flare_cache.record import RecordError, RecordHeader, check_header, decode_header
from flare_core.geometry import SetIdentity
from flare_qualify.sim.disk import Inode, SimDisk
from flare_qualify.sim.oracle import Oracle

__all__ = ["DiskReader", "Found", "format_digest", "section_problem"]

_ADDRESS = struct.Struct("<16sII8x")


def format_digest(store_id: bytes, rank: int, *, index: int, payload: memoryview | bytes) -> bytes:
    """The digest of a section as the format defines it; code of its own, so that the checkers do not err with flare."""
    digest = xxhash.xxh3_128(_ADDRESS.pack(store_id, rank, index))
    digest.update(payload)
    found: bytes = digest.digest()
    return found


def section_problem(header: RecordHeader, data: memoryview, rank: int) -> str | None:
    """Which digest of what a file or shard of legal size holds is wrong; None: none."""
    layout, store_id = header.layout, header.identity.store_id
    for index in range(layout.num_pages + (layout.has_tail and len(data) >= layout.tail_end)):
        start = layout.section_offset(index)
        section = data[start : start + layout.page_bytes]
        if format_digest(store_id, rank, index=index, payload=section) != header.digest_at(index):
            return f"the digest of section {index} is wrong"
    if layout.has_row and len(data) >= layout.row_end:
        row = data[layout.tail_end : layout.row_end]
        if format_digest(store_id, rank, index=ROW_INDEX, payload=row) != header.digest_at(layout.num_digests - 1):
            return "the digest of the row is wrong"
    return None


@dataclass(frozen=True, slots=True)
class Found:
    """A sound header, and the legal size that the file counts as."""

    header: RecordHeader
    size: int

    @property
    def identity(self) -> RecordIdentity:
        """Of the record."""
        return self.header.identity

    @property
    def has_tail(self) -> bool:
        """The tail is there."""
        return self.header.layout.has_tail and self.size >= self.header.layout.tail_end

    @property
    def has_row(self) -> bool:
        """The row is there."""
        return self.header.layout.has_row and self.size >= self.header.layout.row_end


@dataclass(slots=True)
class DiskReader:
    """Reads files as they are; remembers headers by the version of their file."""

    identity: SetIdentity
    oracle: Oracle
    _fingerprint: bytes = b""
    _known: dict[tuple[int, int], tuple[int, Found | None]] = field(default_factory=dict)

    def found(self, disk: SimDisk, name: str) -> Found | None:
        """The record of that name; None where there is none, or none that can be read."""
        inode = disk.names.get(name)
        if inode is None:
            return None
        place = (disk.rank, inode.number)
        known = self._known.get(place)
        if known is not None and known[0] == inode.version:
            return known[1]
        found = self._read(disk, inode, name)
        self._known[place] = (inode.version, found)
        return found

    def _read(self, disk: SimDisk, inode: Inode, name: str) -> Found | None:
        self._fingerprint = self._fingerprint or self.identity.fingerprint()
        try:
            header = decode_header(memoryview(inode.data))
            check_header(header, set_fingerprint=self._fingerprint, geometry=self.identity.geometries[disk.rank])
        except RecordError:
            return None
        size = header.layout.legal_size(len(inode.data))
        if size is None or header.identity.key.hex() != name[:64]:
            return None
        return Found(header, size)

    def problem(self, disk: SimDisk, name: str) -> str | None:
        """What is wrong with a record's file: its digests, or bytes that are not those of its tokens. None: nothing."""
        found = self.found(disk, name)
        if found is None:
            return "it cannot be read"
        data = disk.names[name].data
        header, layout = found.header, found.header.layout
        identity = found.identity
        self.oracle.learn_record(identity, header.token_ids)
        expected = self.oracle.sections(identity, disk.rank)
        problem = section_problem(header, memoryview(data)[: found.size], disk.rank)
        if problem is not None:
            return problem
        for index in range(layout.num_pages + found.has_tail):
            start = layout.section_offset(index)
            section = memoryview(data)[start : start + layout.page_bytes]
            if expected is not None:
                right = expected[index]
                if section[: len(right)] != right:
                    return f"section {index} does not hold its tokens' bytes"
                if any(section[len(right) : 8 * identity.page_tokens]):
                    return f"section {index} holds bytes behind its {len(right) // 8} tokens"
        if found.has_row:
            row = memoryview(data)[layout.tail_end : layout.row_end]
            right_row = self.oracle.row(identity, disk.rank)
            if right_row is not None and row[: len(right_row)] != right_row:
                return "the row is not that of its tokens"
        return None
