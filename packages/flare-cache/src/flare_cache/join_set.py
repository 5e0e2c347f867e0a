"""Which records stay: those that every rank holds with an equal header, closed under parents, within the limit. Pure.

Rank zero has its own scan with identities; of the other ranks it needs keys, digests and what is left of tail and row.
A verdict is one byte a record, in the order of the rank's own scan, so that a rank never acts on a name from a frame.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from flare_cache.index import Record, RecordIndex
from flare_cache.record import HAS_ROW
from flare_cache.record_plan import FileSizes
from flare_cache.record_table import KEEP_ROW, KEEP_TAIL, RecordTable, big_endian_words, find_digests

__all__ = [
    "FATE_MASK",
    "Agreement",
    "Summary",
    "Verdict",
    "adopt",
    "agree",
    "common_records",
    "kept_digest",
    "summarise",
]

DIGEST_BYTES = 32
FATE_MASK = 0x0F
"""What of a verdict byte is the :class:`Verdict`; the rest says which parts stay."""
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


class Summary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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


@dataclass(frozen=True, slots=True)
class Agreement:
    """What rank zero proposes.

    Attributes:
        kept: parents before children, with what is left of each on every rank; sizes are of the largest rank's files.
        oldest_first: their keys in order of use, children before parents.
        verdicts: by rank, one byte for each record of its scan.
        kept_bytes: of the rank with the largest files.
    """

    kept: RecordTable
    oldest_first: tuple[bytes, ...]
    verdicts: Mapping[int, bytes]
    kept_bytes: int

    def counts(self) -> dict[int, dict[Verdict, int]]:
        """Records by verdict, by rank."""
        return {rank: _counts(verdicts) for rank, verdicts in self.verdicts.items()}


def _counts(verdicts: bytes) -> dict[Verdict, int]:
    found, numbers = np.unique(np.frombuffer(verdicts, dtype=np.uint8) & FATE_MASK, return_counts=True)
    return {Verdict(code): number for code, number in zip(found.tolist(), numbers.tolist(), strict=True)}


def summarise(records: RecordTable) -> Summary:
    """What a rank tells of its scan."""
    return Summary(records.keys, records.digests.tobytes(), records.parts.tobytes(), records.sizes.tolist())


def kept_digest(summary: Summary, verdicts: bytes) -> bytes:
    """SHA-256 over what is kept and what is left of it, in the order of keys; equal on ranks that mean the same."""
    rows = np.empty(len(summary), dtype=[("key", "V32"), ("digest", "V32"), ("verdict", "u1")])
    rows["key"] = np.frombuffer(summary.keys, dtype="V32")
    rows["digest"] = np.frombuffer(summary.digests, dtype="V32")
    rows["verdict"] = np.frombuffer(verdicts, dtype=np.uint8)
    kept = rows[np.lexsort(big_endian_words(summary.keys))]
    return hashlib.sha256(b"flare/join/1" + kept[kept["verdict"] & FATE_MASK == _KEPT].tobytes()).digest()


def agree(
    own: RecordTable,
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
    kept_at = tree.parents_first[fates[tree.parents_first] == _KEPT]
    num_bytes = _largest_sizes(own, kept_at, parts, sizes)
    by_use = _by_use(tree, kept_at)
    # Cumulated from the last used on: what does not fit beside those used later goes.
    fits = np.cumsum(num_bytes[by_use][::-1])[::-1] <= limit_bytes
    fates[kept_at[by_use[~fits]]] = Verdict.OVER_LIMIT
    oldest_first = kept_at[by_use[fits]]
    stays = fates[kept_at] == _KEPT
    kept_at = kept_at[stays]
    kept = replace(own.taken(kept_at), sizes=num_bytes[stays], parts=parts[kept_at])
    fates[kept_at] = parts[kept_at]
    verdicts = {0: fates.tobytes()}
    for rank, other in others.items():
        verdicts[rank] = _peer_verdicts(other, summary, fates)
    keys = own.identities["key"][oldest_first].tolist()
    return Agreement(kept, tuple(keys), verdicts, int(kept.sizes.sum()))


def _largest_sizes(
    own: RecordTable, places: NDArray[np.intp], parts: NDArray[np.uint8], sizes: FileSizes
) -> NDArray[np.int64]:
    """What each record at ``places`` takes on the rank where it is largest. Few shapes of record occur."""
    rows = own.identities[places]
    shapes = np.stack(
        [rows["end"] - rows["start"], rows["tail_tokens"], rows["page_tokens"], rows["flags"] & HAS_ROW, parts[places]],
        axis=1,
    )
    _, first, shape_of = np.unique(shapes, axis=0, return_index=True, return_inverse=True)
    known = [
        sizes.largest(
            own[int(places[at])].identity,
            has_tail=bool(parts[places[at]] & KEEP_TAIL),
            has_row=bool(parts[places[at]] & KEEP_ROW),
        )
        for at in first.tolist()
    ]
    return np.array(known, dtype=np.int64)[shape_of.reshape(-1)]


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
    parents: NDArray[np.intp]
    fits: NDArray[np.bool_]
    has_pages: NDArray[np.bool_]
    parents_first: NDArray[np.intp]


def _tree(own: RecordTable, summary: Summary) -> _Tree:
    identities = own.identities
    starts = identities["start"]
    whole_ends = identities["end"] - identities["tail_tokens"]
    parents = np.where(own.has_parent, find_digests(identities["parent_key"].tobytes(), summary.keys), -1)
    inside = (parents >= 0) & (starts[parents] < starts) & (starts <= whole_ends[parents])
    return _Tree(
        starts,
        parents,
        np.where(own.has_parent, inside, starts == 0),
        whole_ends > starts,
        np.argsort(starts, kind="stable"),
    )


def _drop_unrooted(tree: _Tree, fates: NDArray[np.uint8], parts: NDArray[np.uint8]) -> None:
    """Give a fate to what every rank holds and yet cannot stay: its parent is not kept, or nothing is left in it."""
    is_held = fates == _KEPT
    is_empty = ~tree.has_pages & ((parts & KEEP_TAIL) == 0)
    if (is_held & tree.fits & ~is_empty).all():
        return
    parents, is_bad = tree.parents.tolist(), (~tree.fits).tolist()
    is_bare, found = is_empty.tolist(), fates.tolist()
    for at in tree.parents_first.tolist():
        if found[at] != _KEPT:
            continue
        if is_bad[at] or (parents[at] >= 0 and found[parents[at]] != _KEPT):
            found[at] = Verdict.ORPHANED
        elif is_bare[at]:
            found[at] = Verdict.EMPTY
    fates[:] = found


def _shared(own: Summary, others: Mapping[int, Summary]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """For each of rank zero's records: KEPT if every rank holds it, or why not; and what every rank has of it."""
    fates = np.zeros(len(own), dtype=np.uint8)
    parts = np.frombuffer(own.parts, dtype=np.uint8)
    for other in others.values():
        at = find_digests(own.digests, other.digests)
        absent = np.where(find_digests(own.keys, other.keys) < 0, np.uint8(Verdict.MISSING), np.uint8(Verdict.DIFFERS))
        fates = np.where((at < 0) & (fates == Verdict.KEPT), absent, fates)
        parts = np.where(at < 0, parts, parts & _taken(other.parts, at))
    return fates, parts


def _peer_verdicts(other: Summary, own: Summary, fates: NDArray[np.uint8]) -> bytes:
    at = find_digests(other.digests, own.digests)
    absent = np.where(find_digests(other.keys, own.keys) < 0, np.uint8(Verdict.MISSING), np.uint8(Verdict.DIFFERS))
    return np.where(at < 0, absent, _taken(fates.tobytes(), at)).astype(np.uint8).tobytes()


def _taken(values: bytes, at: NDArray[np.intp]) -> NDArray[np.uint8]:
    """``values`` at those places; anything where the place is -1."""
    return np.frombuffer(values or b"\0", dtype=np.uint8)[at]


def _by_use(tree: _Tree, kept_at: NDArray[np.intp]) -> NDArray[np.intp]:
    """Places in ``kept_at`` (parents first), oldest use first, children before their parents.

    A record counts as used when the last used of those that extend it was.
    """
    parents = tree.parents.tolist()
    last_use = list(range(len(parents)))
    for at in reversed(kept_at.tolist()):
        parent = parents[at]
        if parent >= 0 and last_use[parent] < last_use[at]:
            last_use[parent] = last_use[at]
    uses = np.array(last_use, dtype=np.int64)[kept_at]
    return np.lexsort((-tree.starts[kept_at], uses))


def common_records(summaries: Sequence[Summary]) -> tuple[int, int]:
    """How many records all of ``summaries`` hold alike, and their bytes by the sizes of the first."""
    first, *rest = summaries
    alike = np.ones(len(first), dtype=bool)
    for summary in rest:
        alike &= find_digests(first.digests, summary.digests) >= 0
    return int(alike.sum()), sum(itertools.compress(first.sizes, alike))


def adopt(agreement: Agreement, page_tokens: int) -> RecordIndex:
    """The index of what was agreed."""
    kept = agreement.kept
    index = RecordIndex(page_tokens)
    records: dict[bytes, Record] = {}
    for identity, token_ids, num_bytes, part in zip(
        kept.each_identity(), kept.token_ids, kept.sizes.tolist(), kept.parts.tolist(), strict=True
    ):
        records[identity.key] = Record(
            identity,
            token_ids,
            num_bytes,
            tail_tokens=identity.tail_tokens if part & KEEP_TAIL else 0,
            has_row=bool(part & KEEP_ROW),
            parent=records.get(identity.parent_key),
        )
    index.adopt(records.values(), oldest_first=agreement.oldest_first)
    return index
