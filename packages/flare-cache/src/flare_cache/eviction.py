"""What must go so that a new record fits: the limit's accounts and the choice of victims. Pure.

Bytes are those of the rank where a file is largest. They are charged before any rank writes and credited when every
rank has unlinked; so the charge never falls short of what any rank's directory holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flare_cache.index import Record, RecordIndex

__all__ = ["ROW_SPACING_TOKENS", "Budget", "DropRow", "Evict", "Relief", "choose_relief", "is_row_spare"]

ROW_SPACING_TOKENS = 65_536
"""Compaction keeps a row at least every so many tokens of a lineage."""


@dataclass(slots=True)
class Budget:
    """Bytes charged against the agreed limit of one tier."""

    limit_bytes: int
    charged_bytes: int = 0

    def shortage(self, num_bytes: int) -> int:
        """Bytes that must be credited before ``num_bytes`` can be reserved; 0 when they fit now."""
        return max(0, self.charged_bytes + num_bytes - self.limit_bytes)

    def charge(self, num_bytes: int) -> None:
        """Reserve, before any rank writes."""
        self.charged_bytes += num_bytes

    def credit(self, num_bytes: int) -> None:
        """Give back, after every rank has unlinked or truncated."""
        self.charged_bytes -= num_bytes


@dataclass(frozen=True, slots=True)
class Evict:
    """Unlink the whole record."""

    record: Record
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DropRow:
    """Truncate its row, which a descendant's row replaces."""

    record: Record
    num_bytes: int


Relief = Evict | DropRow


def choose_relief(
    index: RecordIndex, num_bytes: int, *, row_bytes: Callable[[Record], int], row_spacing: int = ROW_SPACING_TOKENS
) -> list[Relief]:
    """What to drop, in this order, to credit at least ``num_bytes``; less when no more can go.

    Oldest use first; leaves before parents; never what is pinned or not stored. ``row_bytes`` says what dropping a
    record's row credits.
    """
    chosen: list[Relief] = []
    gone: set[bytes] = set()
    dropped: set[bytes] = set()
    num_freed = 0
    for record in index.records():
        if num_freed >= num_bytes:
            break
        for relief in _possible(record, gone, dropped, row_bytes=row_bytes, row_spacing=row_spacing):
            chosen.append(relief)
            num_freed += relief.num_bytes
            (gone if isinstance(relief, Evict) else dropped).add(record.key)
    return chosen


def _possible(
    record: Record, gone: set[bytes], dropped: set[bytes], *, row_bytes: Callable[[Record], int], row_spacing: int
) -> Iterator[Relief]:
    if record.num_pins or not record.is_stored or not record.is_usable:
        return
    if all(key in gone for key in record.children):
        yield Evict(record, record.num_bytes)
    elif record.has_row and is_row_spare(record, gone=gone, dropped=dropped, spacing=row_spacing):
        yield DropRow(record, row_bytes(record))


def is_row_spare(record: Record, *, gone: set[bytes], dropped: set[bytes], spacing: int) -> bool:
    """Whether a descendant's row, at most ``spacing`` tokens behind the last row in front of this one, stands in."""
    before = 0
    for ancestor in record.lineage():
        if ancestor is not record and ancestor.has_row and ancestor.key not in dropped:
            before = ancestor.identity.end
            break
    waiting = list(record.children.values())
    for descendant in waiting:
        if descendant.key in gone:
            continue
        if descendant.has_row and descendant.is_stored and descendant.is_usable and descendant.key not in dropped:
            if descendant.identity.end - before <= spacing:
                return True
        elif descendant.identity.end - before <= spacing:
            waiting.extend(descendant.children.values())
    return False
