"""Which records stay: those that every rank holds with an equal header, closed under parents, within the limit. Pure.

Rank zero has its own scan with identities; of the other ranks it needs keys, digests and what is left of tail and row.
A verdict is one byte a record, in the order of the rank's own scan, so that a rank never acts on a name from a frame.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from flare_cache.index import Record, RecordIndex
from flare_cache.record_plan import FileSizes
from flare_cache.scan import ScannedRecord

__all__ = [
    "KEEP_ROW",
    "KEEP_TAIL",
    "Agreement",
    "KeptRecord",
    "Summary",
    "Verdict",
    "adopt",
    "agree",
    "common_bytes",
    "kept_digest",
    "summarise",
]

DIGEST_BYTES = 32
KEEP_TAIL = 0x40
KEEP_ROW = 0x80
_VERDICT_MASK = 0x0F
_KEPT = 0
"""``Verdict.KEPT``; an enum is compared three times as slowly, and this is asked of every record."""


class Verdict(enum.IntEnum):
    """What becomes of a record on one rank, and why; the low bits of a verdict byte."""

    KEPT = 0
    MISSING = 1
    """Some rank does not hold it."""
    DIFFERS = 2
    """Some rank holds another store under this key."""
    ORPHANED = 3
    """What it extends is not kept."""
    EMPTY = 4
    """Nothing but a tail was in it, and some rank lost that."""
    OVER_LIMIT = 5
    """Least recently used, and the agreed limit is smaller."""


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds, in the order of its scan.

    Attributes:
        keys: 32 bytes a record.
        digests: 32 bytes a record: SHA-256 of its rank-invariant header.
        parts: one byte a record: KEEP_TAIL and KEEP_ROW where it has them.
        sizes: file size of each record.
    """

    keys: bytes
    digests: bytes
    parts: bytes
    sizes: list[int]

    def __len__(self) -> int:
        return len(self.parts)

    def is_well_formed(self) -> bool:
        """Whether every record has all four parts."""
        num_bytes = DIGEST_BYTES * len(self.parts)
        return len(self.keys) == len(self.digests) == num_bytes and len(self.sizes) == len(self.parts)

    def key(self, at: int) -> bytes:
        """Key of record ``at``."""
        return self.keys[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]

    def digest(self, at: int) -> bytes:
        """Digest of record ``at``."""
        return self.digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]


class KeptRecord(msgspec.Struct, frozen=True):
    """A record that stays, and what is left of it on every rank."""

    scanned: ScannedRecord
    has_tail: bool
    has_row: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """What rank zero proposes.

    Attributes:
        kept: parents before children.
        oldest_first: their keys in order of use, children before parents.
        verdicts: by rank, one byte for each record of its scan.
        kept_bytes: of the rank with the largest files.
    """

    kept: tuple[KeptRecord, ...]
    oldest_first: tuple[bytes, ...]
    verdicts: Mapping[int, bytes]
    kept_bytes: int

    def counts(self) -> dict[int, dict[Verdict, int]]:
        """Records by verdict, by rank."""
        return {
            rank: {Verdict(code): number for code, number in sorted(Counter(b & _VERDICT_MASK for b in bytes_).items())}
            for rank, bytes_ in self.verdicts.items()
        }


def summarise(records: Sequence[ScannedRecord]) -> Summary:
    """What a rank tells of its scan."""
    return Summary(
        b"".join(record.identity.key for record in records),
        b"".join(record.invariant_digest for record in records),
        bytes((KEEP_TAIL if record.has_tail else 0) | (KEEP_ROW if record.has_row else 0) for record in records),
        [record.size for record in records],
    )


def kept_digest(summary: Summary, verdicts: bytes) -> bytes:
    """SHA-256 over what is kept and what is left of it, in the order of keys; equal on ranks that mean the same."""
    kept = sorted(
        summary.key(at) + summary.digest(at) + bytes((verdict,))
        for at, verdict in enumerate(verdicts)
        if not verdict & _VERDICT_MASK
    )
    return hashlib.sha256(b"flare/join/1" + b"".join(kept)).digest()


def agree(
    own: Sequence[ScannedRecord],
    summary: Summary,
    *,
    others: Mapping[int, Summary],
    sizes: FileSizes,
    limit_bytes: int,
) -> Agreement:
    """The records that stay.

    Args:
        own: rank zero's scan, oldest use first, with token ids.
        summary: of it.
        others: the peers' summaries, by rank.
        sizes: of this group's files.
        limit_bytes: what kept records may take on the rank where they are largest.
    """
    fates, parts = _shared(summary, others)
    tree = _tree(own, summary)
    _drop_unrooted(tree, fates, parts)
    kept_at = [at for at in tree.parents_first if fates[at] == _KEPT]
    num_bytes = {
        at: sizes.largest(own[at].identity, has_tail=bool(parts[at] & KEEP_TAIL), has_row=bool(parts[at] & KEEP_ROW))
        for at in kept_at
    }
    oldest_first = _by_use(tree, kept_at)
    kept_bytes = sum(num_bytes.values())
    num_evicted = 0
    while kept_bytes > limit_bytes:
        at = oldest_first[num_evicted]
        kept_bytes -= num_bytes[at]
        fates[at] = Verdict.OVER_LIMIT
        num_evicted += 1
    kept: list[KeptRecord] = []
    for at in kept_at:
        if fates[at] == _KEPT:
            fates[at] = part = parts[at]
            kept.append(KeptRecord(own[at], bool(part & KEEP_TAIL), bool(part & KEEP_ROW), num_bytes[at]))
    verdicts = {0: bytes(fates)}
    for rank, other in others.items():
        verdicts[rank] = _peer_verdicts(other, summary, fates)
    keys = tuple(summary.key(at) for at in oldest_first[num_evicted:])
    return Agreement(tuple(kept), keys, verdicts, kept_bytes)


@dataclass(frozen=True, slots=True)
class _Tree:
    """How records of a scan extend each other, by their places in it.

    Attributes:
        starts: token positions.
        parents: the record that each extends; -1 for the first of a prompt.
        fits: whether it begins at 0, or at a page boundary behind the first page of its parent.
        has_pages: whole pages are in it.
        parents_first: all places.
    """

    starts: NDArray[np.int64]
    parents: list[int]
    fits: list[bool]
    has_pages: list[bool]
    parents_first: list[int]


def _tree(own: Sequence[ScannedRecord], summary: Summary) -> _Tree:
    identities = [record.identity for record in own]
    starts = np.array([identity.start for identity in identities], dtype=np.int64)
    whole_ends = np.array([identity.end - identity.tail_tokens for identity in identities], dtype=np.int64)
    is_first = np.array([not identity.parent_key for identity in identities], dtype=bool)
    parents = _find(b"".join(identity.parent_key or identity.key for identity in identities), summary.keys)
    inside = (parents >= 0) & (starts[parents] < starts) & (starts <= whole_ends[parents])
    return _Tree(
        starts,
        np.where(is_first, -1, parents).tolist(),
        np.where(is_first, starts == 0, inside).tolist(),
        (whole_ends > starts).tolist(),
        np.argsort(starts, kind="stable").tolist(),
    )


def _drop_unrooted(tree: _Tree, fates: list[int], parts: Sequence[int]) -> None:
    """Give a fate to what every rank holds and yet cannot stay: its parent is not kept, or nothing is left in it."""
    for at in tree.parents_first:
        if fates[at] != _KEPT:
            continue
        parent = tree.parents[at]
        if not tree.fits[at] or (parent >= 0 and fates[parent] != _KEPT):
            fates[at] = Verdict.ORPHANED
        elif not tree.has_pages[at] and not parts[at] & KEEP_TAIL:
            fates[at] = Verdict.EMPTY


def _shared(own: Summary, others: Mapping[int, Summary]) -> tuple[list[int], list[int]]:
    """For each of rank zero's records: KEPT if every rank holds it, or why not; and what every rank has of it."""
    fates = np.zeros(len(own), dtype=np.uint8)
    parts = np.frombuffer(own.parts, dtype=np.uint8)
    for other in others.values():
        at = _find(own.digests, other.digests)
        absent = np.where(_find(own.keys, other.keys) < 0, np.uint8(Verdict.MISSING), np.uint8(Verdict.DIFFERS))
        fates = np.where((at < 0) & (fates == Verdict.KEPT), absent, fates)
        parts = np.where(at < 0, parts, parts & _taken(other.parts, at))
    return fates.tolist(), parts.tolist()


def _peer_verdicts(other: Summary, own: Summary, fates: Sequence[int]) -> bytes:
    at = _find(other.digests, own.digests)
    absent = np.where(_find(other.keys, own.keys) < 0, np.uint8(Verdict.MISSING), np.uint8(Verdict.DIFFERS))
    return np.where(at < 0, absent, _taken(bytes(fates), at)).astype(np.uint8).tobytes()


def _taken(values: bytes, at: NDArray[np.int64]) -> NDArray[np.uint8]:
    """``values`` at those places; anything where the place is -1."""
    return np.frombuffer(values or b"\0", dtype=np.uint8)[at]


def _find(wanted: bytes, held: bytes) -> NDArray[np.int64]:
    """For each 32-byte digest or key of ``wanted`` its place in ``held``, or -1.

    Found by the first eight bytes and compared whole. Two different ones that begin alike, which no one will live to
    see, may hide each other: a record is then taken as absent, never as another.
    """
    sought = np.frombuffer(wanted, dtype="<u8").reshape(-1, 4)
    there = np.frombuffer(held, dtype="<u8").reshape(-1, 4)
    if not len(there):
        return np.full(len(sought), -1, dtype=np.int64)
    order = np.argsort(there[:, 0], kind="stable")
    places = np.minimum(np.searchsorted(there[order, 0], sought[:, 0]), len(there) - 1)
    candidates = order[places]
    return np.where((there[candidates] == sought).all(axis=1), candidates, -1)


def _by_use(tree: _Tree, kept_at: Sequence[int]) -> list[int]:
    """Places of what is kept (given parents first), oldest use first, children before their parents.

    A record counts as used when the last used of those that extend it was.
    """
    last_use = list(range(len(tree.parents)))
    for at in reversed(kept_at):
        parent = tree.parents[at]
        if parent >= 0 and last_use[parent] < last_use[at]:
            last_use[parent] = last_use[at]
    places = np.array(kept_at, dtype=np.int64)
    uses = np.array(last_use, dtype=np.int64)[places]
    found: list[int] = places[np.lexsort((-tree.starts[places], uses))].tolist()
    return found


def common_bytes(summaries: Sequence[Summary]) -> int:
    """Bytes of the records that all of ``summaries`` hold alike, by the sizes of the first."""
    first, *rest = summaries
    alike = np.ones(len(first), dtype=bool)
    for summary in rest:
        alike &= _find(first.digests, summary.digests) >= 0
    return sum(itertools.compress(first.sizes, alike))


def adopt(agreement: Agreement, page_tokens: int) -> RecordIndex:
    """The index of what was agreed."""
    index = RecordIndex(page_tokens)
    records: dict[bytes, Record] = {}
    for kept in agreement.kept:
        identity = kept.scanned.identity
        records[identity.key] = Record(
            identity,
            kept.scanned.token_ids,
            kept.num_bytes,
            tail_tokens=identity.tail_tokens if kept.has_tail else 0,
            has_row=kept.has_row,
            parent=records.get(identity.parent_key),
        )
    index.adopt(records.values(), oldest_first=agreement.oldest_first)
    return index
