"""Pages, rows and the prefix index of the device together: matching, allocating with eviction, registering.

Knows which bytes are where and who uses them; decides nothing about requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flare_core.engine.page_pool import PagePool
from flare_core.engine.prefix_index import Entry, PrefixIndex
from flare_core.engine.row_slots import RowSlots
from flare_core.engine.sequence import Sequence as RequestSequence

__all__ = ["DeviceCache", "DeviceMatch"]


@dataclass(frozen=True, slots=True)
class DeviceMatch:
    """What the device holds of a prompt.

    Attributes:
        pages: whole pages, shared as they are.
        num_tokens: tokens in them and in what is copied.
        source, num_copied: page whose first ``num_copied`` tokens follow, to be copied; -1 and 0 for none.
        row_slot: snapshot of the row at ``num_tokens``; -1 for none.
        num_handed: leading tokens that the prefix store was offered before.
    """

    pages: tuple[int, ...] = ()
    num_tokens: int = 0
    source: int = -1
    num_copied: int = 0
    row_slot: int = -1
    num_handed: int = 0


class DeviceCache:
    """``num_pages`` pages of ``page_tokens`` tokens, and row slots where the model ``has_rows``."""

    def __init__(
        self, *, page_tokens: int, num_pages: int, max_sequences: int, num_row_snapshots: int, has_rows: bool
    ) -> None:
        self.page_tokens = page_tokens
        self.has_rows = has_rows
        self.pool = PagePool(num_pages)
        self.rows = RowSlots(max_sequences, num_row_snapshots)
        self.index = PrefixIndex(
            page_tokens,
            forget_page=lambda page: self.pool.set_cached(page, False),
            forget_row=lambda slot: self.rows.set_cached(slot, False),
        )

    @property
    def num_available(self) -> int:
        """Pages that an allocation may take, free or by eviction."""
        return self.pool.num_free + self.pool.num_cached

    def match(self, root: bytes, keys: Sequence[bytes], data: bytes, *, allow_copy: bool = True) -> DeviceMatch:
        """The longest usable prefix of the tokens in ``data`` (u32 LE); ``keys`` are those of its whole pages.

        For models with rows it ends where a row snapshot stands. Without ``allow_copy`` it ends with a whole page.
        """
        entries = self.index.walk(keys, data)
        base = self.index.of_key(root)
        if self.has_rows:
            return self._match_row(base, entries, data, allow_copy=allow_copy)
        parent = entries[-1] if entries else base
        page_bytes = 4 * self.page_tokens
        rest = data[len(entries) * page_bytes : (len(entries) + 1) * page_bytes]
        if parent is None or not rest or not allow_copy:
            return self._describe(entries)
        source, count = self.index.follower(parent, rest)
        return self._describe(entries, source, count)

    def _match_row(self, base: Entry | None, entries: list[Entry], data: bytes, *, allow_copy: bool) -> DeviceMatch:
        page_bytes = 4 * self.page_tokens
        for depth in range(len(entries), -1, -1):
            node = entries[depth - 1] if depth else base
            if node is None or not node.rows:
                continue
            rest = data[depth * page_bytes : (depth + 1) * page_bytes]
            for point in sorted(node.rows, key=lambda point: len(point.tail), reverse=True):
                if not rest.startswith(point.tail) or (point.tail and not allow_copy):
                    continue
                source, count = self.index.follower(node, point.tail) if point.tail else (None, 0)
                if 4 * count == len(point.tail):
                    return self._describe(entries[:depth], source, count, row_slot=point.slot)
        return DeviceMatch()

    def _describe(
        self, entries: list[Entry], source: Entry | None = None, count: int = 0, *, row_slot: int = -1
    ) -> DeviceMatch:
        num_handed = 0
        for entry in entries:
            if entry.num_handed < self.page_tokens:
                break
            num_handed += self.page_tokens
        if source is not None and num_handed == len(entries) * self.page_tokens:
            num_handed += min(count, source.num_handed)
        return DeviceMatch(
            pages=tuple(entry.page for entry in entries),
            num_tokens=len(entries) * self.page_tokens + count,
            source=-1 if source is None else source.page,
            num_copied=count,
            row_slot=row_slot,
            num_handed=num_handed,
        )

    def acquire(self, match: DeviceMatch) -> None:
        """Hold everything that ``match`` names."""
        self.pool.acquire(match.pages)
        if match.source >= 0:
            self.pool.acquire((match.source,))
        if match.row_slot >= 0:
            self.rows.hold(match.row_slot)
            self.rows.set_cached(match.row_slot, True)

    def drop(self, match: DeviceMatch) -> None:
        """Undo :meth:`acquire`."""
        if match.source >= 0:
            self.release((match.source,))
        self.release(reversed(match.pages))
        if match.row_slot >= 0:
            self.rows.drop(match.row_slot)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, referenced once, evicting what was used longest ago; None when not so many can be had."""
        if count > self.num_available:
            return None
        while self.pool.num_free < count:
            if not self.index.evict(self.pool.is_idle):
                raise AssertionError("cached pages are counted that the index does not know")
        return self.pool.allocate(count)

    def make_room(self, sequence: RequestSequence, num_tokens: int) -> int:
        """How many tokens more the sequence's pages hold; it gets pages for ``num_tokens`` where some are to be had."""
        num_missing = sequence.num_pages_for(sequence.num_computed + num_tokens) - len(sequence.pages)
        if num_missing > 0:
            sequence.pages.extend(self.allocate(num_missing) or ())
        return len(sequence.pages) * sequence.page_tokens - sequence.num_computed

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each; give them deepest first, so that leaves are evicted before parents."""
        for page in self.pool.release(pages):
            self.index.let_go(page)

    def unpin(self, pages: Iterable[int]) -> None:
        """A transfer is over with these."""
        for page in self.pool.unpin(pages):
            self.index.let_go(page)

    def take_snapshot(self) -> int | None:
        """A snapshot slot, held once, evicting the one used longest ago; None when all are held."""
        slot = self.rows.take_snapshot()
        if slot is None:
            oldest = self.rows.oldest_cached()
            if oldest is None:
                return None
            self.index.remove_row(oldest)
            slot = self.rows.take_snapshot()
        return slot

    def register(self, sequence: RequestSequence, num_tokens: int, *, with_tail: bool) -> None:
        """Learn the sequence's pages of its first ``num_tokens`` tokens, all known and computed by planned steps."""
        size = self.page_tokens
        num_whole, num_tail = divmod(num_tokens, size)
        with_tail = with_tail and num_tail > 0
        if sequence.num_registered >= num_whole and not with_tail:
            return
        sequence.extend_keys(num_tokens)
        first = sequence.num_registered
        parent = self.index.of_key(sequence.keys[first - 1]) if first else self.index.root(sequence.root)
        if parent is None:
            first, parent = 0, self.index.root(sequence.root)
        for at in range(first, num_whole):
            key = sequence.keys[at]
            entry = self.index.of_key(key)
            if entry is None:
                tokens = sequence.tokens.bytes(at * size, at * size + size)
                entry = self._insert(parent, key, sequence.pages[at], tokens)
            parent = entry
        sequence.num_registered = num_whole
        if with_tail:
            tokens = sequence.tokens.bytes(num_whole * size, num_tokens)
            if self.index.insert(parent, None, page=sequence.pages[num_whole], tokens=tokens):
                self.pool.set_cached(sequence.pages[num_whole], True)

    def _insert(self, parent: Entry, key: bytes, page: int, tokens: bytes) -> Entry:
        entry = self.index.insert(parent, key, page=page, tokens=tokens)
        if entry is None:
            raise AssertionError(f"page {page} was not registered under a key that was free")
        self.pool.set_cached(page, True)
        return entry

    def register_row(self, sequence: RequestSequence, num_tokens: int, slot: int) -> None:
        """Learn that snapshot ``slot`` holds the row at ``num_tokens``; the pages up to there are registered."""
        num_whole = num_tokens // self.page_tokens
        node = self.index.of_key(sequence.keys[num_whole - 1] if num_whole else sequence.root)
        tail = sequence.tokens.bytes(num_whole * self.page_tokens, num_tokens)
        if node is not None and self.index.add_row(node, tail, slot):
            self.rows.set_cached(slot, True)

    def mark_handed(self, sequence: RequestSequence, num_tokens: int) -> None:
        """The prefix store was offered, or gave, the sequence's first ``num_tokens`` tokens."""
        num_whole, num_tail = divmod(num_tokens, self.page_tokens)
        for key in sequence.keys[sequence.num_handed // self.page_tokens : num_whole]:
            entry = self.index.of_key(key)
            if entry is not None:
                entry.num_handed = self.page_tokens
        if num_tail:
            entry = self.index.of_page(sequence.pages[num_whole])
            if entry is not None:
                entry.num_handed = max(entry.num_handed, num_tail)
        sequence.num_handed = max(sequence.num_handed, num_tokens)

    def forget_handed(self, keys: Sequence[bytes], tail_source: int | None) -> None:
        """A store failed: what it covered, whole pages and the page its tail was copied from, may be offered again."""
        entries = [self.index.of_key(key) for key in keys]
        if tail_source is not None:
            entries.append(self.index.of_page(tail_source))
        for entry in entries:
            if entry is not None:
                entry.num_handed = 0
