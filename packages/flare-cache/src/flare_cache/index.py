"""One tier's record index: which record holds the page behind each chain key, and what follows a boundary.

Rank zero alone has one; peers only run jobs. The index knows identities, token ids, parents and use order. It knows
no file, no tier and no job; it is used from one thread.

Memory: a page costs one dictionary entry (its key, and a reference to its record: the page's number follows from
its position); a record keeps its token ids as the bytes that its job carried. Four bytes a token are a thousandth
of the KV they stand for, and divergence inside any page can be answered without opening a file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from flare_cache.jobs import RecordIdentity
from flare_core.keys import packed_chain_keys

__all__ = ["CommonRun", "Record", "RecordIndex", "common_tokens"]

_TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class Record:
    """A record as rank zero sees it.

    Attributes:
        identity: the rank-invariant header, as it was stored.
        token_ids: ids of [start, end), u32 little endian.
        num_bytes: what is charged for it: its file on the rank where that is largest.
        tail_tokens, has_row: what is left after truncation.
        parent: the record that this one extends.
        children: records that extend this one, stored or on their way, by key.
        is_stored: every rank holds it; until then only planning sees it.
        is_usable: False once it failed or its removal was planned: nothing new builds on it.
        num_pins: transfers that need it where it is.
        in_pool: the pool has it too, as far as is known.
    """

    identity: RecordIdentity
    token_ids: bytes
    num_bytes: int
    tail_tokens: int
    has_row: bool
    parent: Record | None = None
    children: dict[bytes, Record] = field(default_factory=dict)
    is_stored: bool = False
    is_usable: bool = True
    num_pins: int = 0
    in_pool: bool = False

    @property
    def key(self) -> bytes:
        """The record's key."""
        return self.identity.key

    @property
    def first_page(self) -> int:
        """Index in a sequence's page table of its first section."""
        return self.identity.start // self.identity.page_tokens

    @property
    def num_pages(self) -> int:
        """Whole pages."""
        return self.identity.num_pages

    @property
    def is_empty(self) -> bool:
        """Nothing is left in it that could be restored."""
        return self.num_pages == 0 and self.tail_tokens == 0

    def section_ids(self, section: int) -> bytes:
        """Token ids of one section; the tail is section ``num_pages``."""
        step = self.identity.page_tokens * _TOKEN_BYTES
        return self.token_ids[section * step : (section + 1) * step]

    def page_keys(self) -> list[bytes]:
        """Chain keys of its whole pages; computed, not kept."""
        identity = self.identity
        if identity.tail_tokens:
            return packed_chain_keys(identity.start_key, self.token_ids, identity.page_tokens)
        # Without a tail the last page's key is the record's own.
        inner = self.token_ids[: -_TOKEN_BYTES * identity.page_tokens]
        return [*packed_chain_keys(identity.start_key, inner, identity.page_tokens), identity.key]

    def tail_boundary(self) -> bytes:
        """Chain key in front of the tail."""
        keys = self.page_keys()
        return keys[-1] if keys else self.identity.start_key

    def lineage(self) -> Iterator[Record]:
        """The record, its parent, and so on to the root."""
        current: Record | None = self
        while current is not None:
            yield current
            current = current.parent

    def subtree(self) -> list[Record]:
        """The record and all that extends it, parents before children."""
        found = [self]
        for record in found:
            found.extend(record.children.values())
        return found


@dataclass(frozen=True, slots=True)
class CommonRun:
    """The longest run of tokens that a page or tail behind a boundary shares with a prompt."""

    record: Record
    section: int
    num_tokens: int


class _Branches:
    """Sections that follow one boundary, sorted by their ids so that the best match is a neighbour."""

    __slots__ = ("ids", "places")

    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.places: list[tuple[Record, int]] = []

    def add(self, record: Record, section: int) -> None:
        ids = record.section_ids(section)
        at = bisect_right(self.ids, ids)
        self.ids.insert(at, ids)
        self.places.insert(at, (record, section))

    def discard(self, record: Record, section: int) -> None:
        ids = record.section_ids(section)
        for at in range(bisect_left(self.ids, ids), bisect_right(self.ids, ids)):
            if self.places[at] == (record, section):
                del self.ids[at], self.places[at]
                return

    def neighbours(self, ids: bytes) -> list[tuple[Record, int]]:
        """Where the longest common prefix with ``ids`` must be."""
        at = bisect_left(self.ids, ids)
        return self.places[max(0, at - 1) : at + 1]

    def prefixes(self, ids: bytes) -> Iterator[tuple[Record, int]]:
        """Sections that ``ids`` begins with, longest first."""
        while ids:
            end = bisect_right(self.ids, ids)
            if end == 0:
                return
            nearest = self.ids[end - 1]
            num_shared = common_tokens(nearest, ids)
            if num_shared * _TOKEN_BYTES == len(nearest):
                yield from self.places[bisect_left(self.ids, nearest) : end]
                num_shared -= 1
            # Whatever else is a prefix of ids is one of what the two share.
            ids = ids[: num_shared * _TOKEN_BYTES]


class RecordIndex:
    """Records of one tier by key, by page and by what follows a boundary; also their order of use."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        # Oldest use first. Using a record uses its ancestors after it, so that no record is older than its children.
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._pages: dict[bytes, Record] = {}
        self._branches: dict[bytes, _Branches] = {}

    def __len__(self) -> int:
        return len(self._records)

    def records(self) -> Iterator[Record]:
        """All records, oldest use first; the index must not change meanwhile."""
        return iter(self._records.values())

    def get(self, key: bytes) -> Record | None:
        """The record of this key, on its way, stored or about to go."""
        return self._records.get(key)

    def holder(self, page_key: bytes) -> Record | None:
        """The usable record, stored or on its way, that holds the page behind ``page_key``."""
        record = self._pages.get(page_key)
        return record if record is not None and record.is_usable else None

    def num_present(self, page_keys: Sequence[bytes]) -> int:
        """How many leading pages a chain of keys finds, stored or on their way.

        By bisection: what can be used is closed under parents.
        """
        low, high = 0, len(page_keys)
        while low < high:
            middle = (low + high + 1) // 2
            if self.holder(page_keys[middle - 1]) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def add(self, record: Record) -> None:
        """Take in a record on its way, as the last used: planning sees it, lookup does not.

        Raises:
            ValueError: its key is in the index.
        """
        self._insert(record)
        self.use(record)

    def adopt(self, records: Iterable[Record], *, oldest_first: Iterable[bytes]) -> None:
        """Take in what join kept: stored records, parents first.

        ``oldest_first`` names every record in the order of use, children before their parents.
        """
        for record in records:
            self._insert(record)
            self.mark_stored(record)
        for key in oldest_first:
            self._records.move_to_end(key)

    def _insert(self, record: Record) -> None:
        if record.key in self._records:
            raise ValueError(f"record {record.key.hex()} is in the index")
        self._records[record.key] = record
        for key in record.page_keys():
            # The first holder of a page stays the one that is used, unless it is about to go.
            if not self._pages.setdefault(key, record).is_usable:
                self._pages[key] = record
        if record.parent is not None:
            record.parent.children[record.key] = record

    def mark_stored(self, record: Record) -> None:
        """Every rank holds it: lookup may offer it."""
        record.is_stored = True
        if record.num_pages:
            self._branches.setdefault(record.identity.start_key, _Branches()).add(record, 0)
        if record.tail_tokens:
            self._branches.setdefault(record.tail_boundary(), _Branches()).add(record, record.num_pages)

    def truncated(self, record: Record, *, keep_tail: bool) -> None:
        """Offer its row, and unless ``keep_tail`` its tail, no more."""
        record.has_row = False
        if not keep_tail and record.tail_tokens:
            self._forget_branch(record.tail_boundary(), record, record.num_pages)
            record.tail_tokens = 0

    def hide(self, record: Record) -> None:
        """Offer it no more; it stays known until :meth:`remove`."""
        record.is_usable = False
        if record.is_stored and record.num_pages:
            self._forget_branch(record.identity.start_key, record, 0)
        if record.is_stored and record.tail_tokens:
            self._forget_branch(record.tail_boundary(), record, record.num_pages)

    def remove(self, record: Record) -> None:
        """Forget a hidden record that has no children any more."""
        del self._records[record.key]
        for key in record.page_keys():
            if self._pages.get(key) is record:
                del self._pages[key]
        if record.parent is not None:
            del record.parent.children[record.key]

    def bury(self, record: Record) -> None:
        """Take a hidden record out of the tree and keep its key taken: some rank still holds a file of that name."""
        self.remove(record)
        self._records[record.key] = record
        record.parent = None

    def use(self, record: Record) -> None:
        """Make the record and its ancestors the last used."""
        for current in record.lineage():
            self._records.move_to_end(current.key)

    def longest_run(self, boundary: bytes, num_pages: int, ids: bytes) -> CommonRun | None:
        """The longest common run of ``ids`` with any stored page or tail that follows ``boundary``.

        Args:
            boundary: chain key of the last whole page, or the root.
            num_pages: whole pages in front of the boundary.
            ids: token ids that follow the boundary, u32 little endian; at most a page of them is compared.
        """
        ids = ids[: self._page_tokens * _TOKEN_BYTES]
        best: CommonRun | None = None
        for record, section in self._followers(boundary, num_pages, ids):
            num_tokens = common_tokens(record.section_ids(section), ids)
            if num_tokens and (best is None or num_tokens > best.num_tokens):
                best = CommonRun(record, section, num_tokens)
        return best

    def row_tail(self, boundary: bytes, ids: bytes) -> Record | None:
        """The stored record with a row whose tail is the longest that ``ids``, behind ``boundary``, begin with."""
        branches = self._branches.get(boundary)
        if branches is None:
            return None
        for record, section in branches.prefixes(ids[: (self._page_tokens - 1) * _TOKEN_BYTES]):
            if section == record.num_pages and record.has_row:
                return record
        return None

    def covered_tails(self, record: Record) -> list[Record]:
        """Other stored records whose tail adds nothing, since a section of ``record`` begins with it."""
        covered: list[Record] = []
        boundaries = [record.identity.start_key, *record.page_keys()]
        for section in range(record.num_pages + (1 if record.tail_tokens else 0)):
            branches = self._branches.get(boundaries[section])
            if branches is None:
                continue
            for other, place in branches.prefixes(record.section_ids(section)):
                if place == other.num_pages and other is not record:
                    covered.append(other)
        return covered

    def _followers(self, boundary: bytes, num_pages: int, ids: bytes) -> Iterator[tuple[Record, int]]:
        branches = self._branches.get(boundary)
        if branches is not None:
            yield from branches.neighbours(ids)
        # A page in the middle of a record is not among the branches; a tail or a first page is.
        holder = self.holder(boundary)
        if holder is not None and holder.is_stored and 0 < num_pages - holder.first_page < holder.num_pages:
            yield holder, num_pages - holder.first_page

    def _forget_branch(self, boundary: bytes, record: Record, section: int) -> None:
        branches = self._branches.get(boundary)
        if branches is None:
            return
        branches.discard(record, section)
        if not branches.ids:
            del self._branches[boundary]


def common_tokens(first: bytes, second: bytes) -> int:
    """How many token ids two runs of u32 ids share from their start."""
    num_tokens = min(len(first), len(second)) // _TOKEN_BYTES
    length = num_tokens * _TOKEN_BYTES
    if first[:length] == second[:length]:
        return num_tokens
    left = np.frombuffer(first, dtype="<u4", count=num_tokens)
    right = np.frombuffer(second, dtype="<u4", count=num_tokens)
    return int(np.argmax(left != right))
