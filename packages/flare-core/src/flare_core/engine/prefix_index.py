"""What is in device pages: a tree of pages by prefix, with partial pages and row snapshots at its leaves.

A whole page is found by its chain key and is compared token by token all the same. A partial page hangs below the
whole page before it and knows how many of its tokens are valid; the live last page of a running sequence is one such,
for a sequence only appends. Knows page ids, not memory; who uses a page is the pool's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Entry", "PrefixIndex", "RowPoint", "common_tokens"]

_TOKEN_BYTES = 4
_MAX_SIBLINGS = 64
"""Followers that are compared with a prompt; beyond these only the youngest are."""


@dataclass(slots=True, eq=False)
class RowPoint:
    """A row snapshot behind a whole-page entry and ``tail`` (token bytes of the partial page that follows)."""

    entry: Entry
    tail: bytes
    slot: int


@dataclass(slots=True, eq=False)
class Entry:
    """One page: ``tokens`` are its valid tokens' ids as u32 LE; a root has no page and no tokens.

    Attributes:
        key: chain key of a root or a whole page; None for a partial page.
        num_handed: tokens of the page that the prefix store has already been offered.
        last_use: the index's clock when the page was last let go.
    """

    parent: Entry | None
    key: bytes | None
    page: int
    tokens: bytes
    num_handed: int = 0
    last_use: int = 0
    alive: bool = True
    children: dict[bytes, list[Entry]] = field(default_factory=dict)
    num_children: int = 0
    rows: list[RowPoint] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Valid tokens of the page."""
        return len(self.tokens) // _TOKEN_BYTES


class PrefixIndex:
    """Entries of up to ``num_pages`` pages.

    ``forget_page`` and ``forget_row`` are called with a page id or slot when it leaves the index.
    """

    def __init__(
        self, page_tokens: int, *, forget_page: Callable[[int], None], forget_row: Callable[[int], None]
    ) -> None:
        self._page_bytes = page_tokens * _TOKEN_BYTES
        self._forget_page = forget_page
        self._forget_row = forget_row
        self._by_key: dict[bytes, Entry] = {}
        self._by_page: dict[int, Entry] = {}
        self._by_row: dict[int, RowPoint] = {}
        self._leaves: list[tuple[int, int, Entry]] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._by_page)

    def of_page(self, page: int) -> Entry | None:
        """The entry of a page."""
        return self._by_page.get(page)

    def of_key(self, key: bytes) -> Entry | None:
        """The entry with this chain key."""
        return self._by_key.get(key)

    def root(self, key: bytes) -> Entry:
        """The entry that stands for the empty prefix below a root key."""
        entry = self._by_key.get(key)
        if entry is None:
            entry = self._by_key[key] = Entry(None, key, -1, b"")
        return entry

    def walk(self, keys: Sequence[bytes], data: bytes) -> list[Entry]:
        """Entries of the longest run of whole pages; ``data`` are the prompt's token ids, u32 LE. O(pages)."""
        entries: list[Entry] = []
        step = self._page_bytes
        at = 0
        find = self._by_key.get
        for key in keys:
            entry = find(key)
            if entry is None or entry.tokens != data[at : at + step]:
                break
            entries.append(entry)
            at += step
        return entries

    def follower(self, parent: Entry, rest: bytes) -> tuple[Entry | None, int]:
        """The page behind ``parent`` that begins with most tokens of ``rest``, and how many."""
        best: Entry | None = None
        longest = 0
        for entry in reversed(parent.children.get(rest[:_TOKEN_BYTES], ())[-_MAX_SIBLINGS:]):
            count = common_tokens(entry.tokens, rest)
            if count > longest:
                best, longest = entry, count
        return best, longest

    def insert(self, parent: Entry, key: bytes | None, *, page: int, tokens: bytes) -> Entry | None:
        """Learn that ``page`` holds ``tokens`` behind ``parent``; ``key`` is the chain key of a whole page.

        The same page may come again with more tokens, and at last whole. None when another page already holds the
        same: the index keeps the older one.
        """
        known = self._by_page.get(page)
        if known is not None and known.parent is parent:
            return self._extend(known, key, tokens)
        if known is not None:
            self.remove(known)
        if key in self._by_key if key is not None else self.follower(parent, tokens)[1] * _TOKEN_BYTES == len(tokens):
            return None
        entry = Entry(parent, key, page, tokens)
        parent.children.setdefault(tokens[:_TOKEN_BYTES], []).append(entry)
        parent.num_children += 1
        self._by_page[page] = entry
        if key is not None:
            self._by_key[key] = entry
        return entry

    def _extend(self, entry: Entry, key: bytes | None, tokens: bytes) -> Entry | None:
        if key is not None and entry.key is None:
            if key in self._by_key:
                self.remove(entry)
                return None
            entry.key = key
            self._by_key[key] = entry
        if len(tokens) > len(entry.tokens):
            entry.tokens = tokens
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget an entry, what hangs below it and their rows. Cost: the entries removed."""
        pending = [entry]
        while pending:
            gone = pending.pop()
            for group in gone.children.values():
                pending.extend(group)
            self._detach(gone)

    def _detach(self, entry: Entry) -> None:
        if not entry.alive:
            return
        entry.alive = False
        for point in list(entry.rows):
            self.remove_row(point.slot)
        if entry.key is not None:
            del self._by_key[entry.key]
        parent = entry.parent
        if parent is None:
            return
        del self._by_page[entry.page]
        if parent.alive:
            siblings = parent.children[entry.tokens[:_TOKEN_BYTES]]
            siblings.remove(entry)
            if not siblings:
                del parent.children[entry.tokens[:_TOKEN_BYTES]]
            parent.num_children -= 1
            if not parent.num_children:
                self._childless(parent)
        self._forget_page(entry.page)

    def let_go(self, page: int) -> None:
        """The page became idle: from now on it may be evicted. Later calls make a page younger."""
        entry = self._by_page[page]
        self._clock += 1
        entry.last_use = self._clock
        if not entry.num_children:
            self._push(entry)

    def evict(self, is_idle: Callable[[int], bool]) -> bool:
        """Remove the idle leaf let go longest ago, or, where no leaf is idle, an idle inner page and all below it.

        False when no page is idle. Amortised O(log n).
        """
        while self._leaves:
            last_use, _, entry = heapq.heappop(self._leaves)
            if entry.alive and entry.last_use == last_use and not entry.num_children and is_idle(entry.page):
                self.remove(entry)
                return True
        idle = [entry for entry in self._by_page.values() if is_idle(entry.page)]
        if idle:
            self.remove(min(idle, key=lambda entry: entry.last_use))
        return bool(idle)

    def _childless(self, entry: Entry) -> None:
        if entry.page >= 0:
            self._push(entry)
        elif not entry.rows:
            self._detach(entry)

    def _push(self, entry: Entry) -> None:
        if len(self._leaves) > 2 * len(self._by_page) + 64:
            self._leaves = [item for item in self._leaves if item[2].alive and item[2].last_use == item[0]]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (entry.last_use, entry.page, entry))

    def add_row(self, entry: Entry, tail: bytes, slot: int) -> bool:
        """Learn that a row snapshot stands behind ``entry`` and ``tail``; False when there is one already."""
        if any(point.tail == tail for point in entry.rows):
            return False
        point = RowPoint(entry, tail, slot)
        entry.rows.append(point)
        self._by_row[slot] = point
        return True

    def remove_row(self, slot: int) -> None:
        """Forget a row snapshot."""
        point = self._by_row.pop(slot)
        point.entry.rows.remove(point)
        self._forget_row(slot)

    def clear(self) -> None:
        """Forget everything."""
        for entry in [entry for entry in self._by_key.values() if entry.parent is None]:
            self.remove(entry)
        self._leaves.clear()

    def entries(self) -> Iterator[Entry]:
        """All entries that have a page, in no order."""
        return iter(self._by_page.values())


def common_tokens(left: bytes, right: bytes) -> int:
    """Number of leading token ids (u32 LE) that both have."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size // _TOKEN_BYTES
    differ = np.frombuffer(left, "<u4", size // _TOKEN_BYTES) != np.frombuffer(right, "<u4", size // _TOKEN_BYTES)
    return int(differ.argmax())
