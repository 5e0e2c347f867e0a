"""Which records stay: those that every rank holds with an equal header, closed under parents, within the limit. Pure.

Rank zero has its own scan with identities; of the other ranks it needs keys, digests and what is left of tail and row.
A verdict is one byte a record, in the order of the rank's own scan, so that a rank never acts on a name from a frame.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

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

    def by_key(self) -> dict[bytes, int]:
        """Positions by key."""
        return {self.key(at): at for at in range(len(self))}


@dataclass(frozen=True, slots=True)
class KeptRecord:
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
        if verdict & _VERDICT_MASK == Verdict.KEPT
    )
    return hashlib.sha256(b"flare/join/1" + b"".join(kept)).digest()


def agree(
    own: Sequence[ScannedRecord], others: Mapping[int, Summary], *, sizes: FileSizes, limit_bytes: int
) -> Agreement:
    """The records that stay.

    Args:
        own: rank zero's scan, oldest use first, with token ids.
        others: the peers' summaries, by rank.
        sizes: of this group's files.
        limit_bytes: what kept records may take on the rank where they are largest.
    """
    places = {rank: summary.by_key() for rank, summary in others.items()}
    fates: dict[bytes, int] = {}
    kept: dict[bytes, KeptRecord] = {}
    for record in sorted(own, key=lambda one: one.identity.start):
        verdict, parts = _shared_parts(record, others, places)
        if verdict is Verdict.KEPT and not _extends_kept(record, kept):
            verdict = Verdict.ORPHANED
        has_tail, has_row = bool(parts & KEEP_TAIL), bool(parts & KEEP_ROW)
        if verdict is Verdict.KEPT and not record.identity.num_pages and not has_tail:
            verdict = Verdict.EMPTY
        fates[record.identity.key] = verdict
        if verdict is Verdict.KEPT:
            num_bytes = sizes.largest(record.identity, has_tail=has_tail, has_row=has_row)
            kept[record.identity.key] = KeptRecord(record, has_tail, has_row, num_bytes)
    oldest_first = _by_use(own, kept)
    kept_bytes = sum(record.num_bytes for record in kept.values())
    num_evicted = 0
    while kept_bytes > limit_bytes:
        gone = kept.pop(oldest_first[num_evicted])
        kept_bytes -= gone.num_bytes
        fates[gone.scanned.identity.key] = Verdict.OVER_LIMIT
        num_evicted += 1
    for key, left in kept.items():
        fates[key] = Verdict.KEPT | (KEEP_TAIL if left.has_tail else 0) | (KEEP_ROW if left.has_row else 0)
    verdicts = {0: bytes(fates[record.identity.key] for record in own)}
    own_digests = {record.identity.key: record.invariant_digest for record in own}
    for rank, summary in others.items():
        verdicts[rank] = bytes(_peer_fate(summary, at, fates, own_digests) for at in range(len(summary)))
    return Agreement(tuple(kept.values()), tuple(oldest_first[num_evicted:]), verdicts, kept_bytes)


def _shared_parts(
    record: ScannedRecord, others: Mapping[int, Summary], places: Mapping[int, Mapping[bytes, int]]
) -> tuple[Verdict, int]:
    """Whether every rank holds it, and which of tail and row every rank has."""
    parts = (KEEP_TAIL if record.has_tail else 0) | (KEEP_ROW if record.has_row else 0)
    for rank, summary in others.items():
        at = places[rank].get(record.identity.key)
        if at is None:
            return Verdict.MISSING, 0
        if summary.digest(at) != record.invariant_digest:
            return Verdict.DIFFERS, 0
        parts &= summary.parts[at]
    return Verdict.KEPT, parts


def _extends_kept(record: ScannedRecord, kept: Mapping[bytes, KeptRecord]) -> bool:
    """Whether it begins a prompt, or at a page boundary behind the first page of a kept parent."""
    identity = record.identity
    if not identity.parent_key:
        return identity.start == 0
    parent = kept.get(identity.parent_key)
    if parent is None:
        return False
    above = parent.scanned.identity
    return above.start < identity.start <= above.end - above.tail_tokens


def _by_use(own: Sequence[ScannedRecord], kept: dict[bytes, KeptRecord]) -> list[bytes]:
    """Keys of ``kept`` (parents first), oldest use first; a parent counts as used when its children were."""
    last_use = {record.identity.key: position for position, record in enumerate(own)}
    for key in reversed(kept):
        parent_key = kept[key].scanned.identity.parent_key
        if parent_key:
            last_use[parent_key] = max(last_use[parent_key], last_use[key])
    return sorted(kept, key=lambda key: (last_use[key], -kept[key].scanned.identity.start))


def _peer_fate(summary: Summary, at: int, fates: Mapping[bytes, int], own_digests: Mapping[bytes, bytes]) -> int:
    key = summary.key(at)
    fate = fates.get(key)
    if fate is None:
        return Verdict.MISSING
    if own_digests[key] != summary.digest(at):
        return Verdict.DIFFERS
    return fate


def common_bytes(summaries: Sequence[Summary]) -> int:
    """Bytes of the records that all of ``summaries`` hold alike, by the sizes of the first."""
    first, *rest = summaries
    places = [summary.by_key() for summary in rest]
    total = 0
    for at in range(len(first)):
        found = [place.get(first.key(at)) for place in places]
        alike = all(
            where is not None and summary.digest(where) == first.digest(at)
            for summary, where in zip(rest, found, strict=True)
        )
        total += first.sizes[at] if alike else 0
    return total


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
