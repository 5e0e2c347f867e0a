"""Very many scanned records as columns, so that a join of 100,000 makes no object for each; a sequence all the same.

Knows the fields of a record's identity; no file, no verdict and no other rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from flare_cache.jobs import RecordIdentity
from flare_cache.record import HAS_PARENT, HAS_ROW, NO_KEY

__all__ = ["IDENTITY", "KEEP_ROW", "KEEP_TAIL", "RecordTable", "ScannedRecord", "big_endian_words", "find_digests"]

KEEP_TAIL = 0x40
KEEP_ROW = 0x80

IDENTITY = np.dtype(
    [
        ("key", "V32"),
        ("store_id", "V16"),
        ("parent_key", "V32"),
        ("start_key", "V32"),
        ("start", "<i8"),
        ("end", "<i8"),
        ("page_tokens", "<u4"),
        ("tail_tokens", "<u4"),
        ("flags", "<u4"),
    ]
)
"""A row is, byte for byte, what stands in a header between the set fingerprint and the token ids."""


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


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable(Sequence[ScannedRecord]):
    """N records, a row each in every column.

    Attributes:
        identities: N rows of :data:`IDENTITY`.
        digests: N x ``V32``: SHA-256 of the rank-invariant header.
        sizes: N x int64: legal size of the file.
        parts: N x uint8: KEEP_TAIL and KEEP_ROW where the file has them.
        token_ids: N byte strings, u32 little endian; empty ones where they were not asked for.
    """

    identities: NDArray[np.void]
    digests: NDArray[np.void]
    sizes: NDArray[np.int64]
    parts: NDArray[np.uint8]
    token_ids: Sequence[bytes]

    @classmethod
    def of(cls, records: Iterable[ScannedRecord]) -> Self:
        """The same records as columns."""
        found = list(records)
        rows = [_row(record.identity) for record in found]
        parts = [(KEEP_TAIL if one.has_tail else 0) | (KEEP_ROW if one.has_row else 0) for one in found]
        return cls(
            np.array(rows, dtype=IDENTITY),
            np.array([record.invariant_digest for record in found], dtype="V32"),
            np.array([record.size for record in found], dtype=np.int64),
            np.array(parts, dtype=np.uint8),
            [record.token_ids for record in found],
        )

    @classmethod
    def joined(cls, tables: Sequence[RecordTable]) -> Self:
        """All rows, one table after the other."""
        if not tables:
            return cls.of(())
        return cls(
            np.concatenate([table.identities for table in tables]),
            np.concatenate([table.digests for table in tables]),
            np.concatenate([table.sizes for table in tables]),
            np.concatenate([table.parts for table in tables]),
            [token_ids for table in tables for token_ids in table.token_ids],
        )

    def taken(self, places: NDArray[np.intp]) -> RecordTable:
        """The rows at ``places``, in that order."""
        return RecordTable(
            self.identities[places],
            self.digests[places],
            self.sizes[places],
            self.parts[places],
            [self.token_ids[at] for at in places.tolist()],
        )

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, at: int) -> ScannedRecord: ...
    @overload
    def __getitem__(self, at: slice) -> RecordTable: ...
    def __getitem__(self, at: int | slice) -> ScannedRecord | RecordTable:
        if isinstance(at, slice):
            return self.taken(np.arange(len(self))[at])
        part = int(self.parts[at])
        return ScannedRecord(
            identity=_identity(self.identities[at].item()),
            invariant_digest=self.digests[at].tobytes(),
            size=int(self.sizes[at]),
            has_tail=bool(part & KEEP_TAIL),
            has_row=bool(part & KEEP_ROW),
            token_ids=self.token_ids[at],
        )

    @property
    def keys(self) -> bytes:
        """32 bytes a record."""
        return self.identities["key"].tobytes()

    @property
    def has_row_stored(self) -> NDArray[np.bool_]:
        """Whether the record was stored with a row."""
        return self._is_flagged(HAS_ROW)

    @property
    def has_parent(self) -> NDArray[np.bool_]:
        """Whether the record extends another."""
        return self._is_flagged(HAS_PARENT)

    def _is_flagged(self, flag: int) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.identities["flags"] & flag) != 0
        return found

    def each_identity(self) -> Iterator[RecordIdentity]:
        """Every record's identity, in order."""
        return (_identity(row) for row in self.identities.tolist())


def _row(identity: RecordIdentity) -> tuple[bytes, bytes, bytes, bytes, int, int, int, int, int]:
    flags = (HAS_ROW if identity.has_row else 0) | (HAS_PARENT if identity.parent_key else 0)
    return (
        identity.key,
        identity.store_id,
        identity.parent_key or NO_KEY,
        identity.start_key,
        identity.start,
        identity.end,
        identity.page_tokens,
        identity.tail_tokens,
        flags,
    )


def _identity(row: tuple[bytes, bytes, bytes, bytes, int, int, int, int, int]) -> RecordIdentity:
    key, store_id, parent_key, start_key, start, end, page_tokens, tail_tokens, flags = row
    return RecordIdentity(
        key=key,
        store_id=store_id,
        parent_key=parent_key if flags & HAS_PARENT else b"",
        start_key=start_key,
        start=start,
        end=end,
        page_tokens=page_tokens,
        tail_tokens=tail_tokens,
        has_row=bool(flags & HAS_ROW),
    )


def find_digests(wanted: bytes, held: bytes) -> NDArray[np.intp]:
    """For each 32-byte digest or key of ``wanted`` its place in ``held``, or -1.

    Found by the first eight bytes and compared whole. Two different ones that begin alike, which no one will live to
    see, may hide each other: a record is then taken as absent, never as another.
    """
    sought = np.frombuffer(wanted, dtype="<u8").reshape(-1, 4)
    there = np.frombuffer(held, dtype="<u8").reshape(-1, 4)
    if not len(there):
        return np.full(len(sought), -1, dtype=np.intp)
    order = np.argsort(there[:, 0], kind="stable")
    places = np.minimum(np.searchsorted(there[order, 0], sought[:, 0]), len(there) - 1)
    candidates = order[places]
    return np.where((there[candidates] == sought).all(axis=1), candidates, -1)


def big_endian_words(keys: bytes) -> tuple[NDArray[np.uint64], ...]:
    """Four columns by which 32-byte keys sort as their bytes do, the last sort key of ``numpy.lexsort`` last."""
    words = np.frombuffer(keys, dtype=">u8").reshape(-1, 4)
    return tuple(words[:, at].astype(np.uint64) for at in (3, 2, 1, 0))
