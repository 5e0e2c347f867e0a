"""A prefix store in this process's memory: perfect but for the faults it is told to show, and as nasty as it may be.

It copies as late as the ports allow, or as early; what it will fetch into it overwrites as early as they allow: so a
page that is used too early, or given away too soon, changes a text. One thread; transfers end only when polled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flare_core.engine.prefix_index import common_tokens
from flare_core.errors import Poisoned
from flare_core.prefix import (
    FetchFinished,
    LookupReady,
    PrefixQuery,
    Restorable,
    Segment,
    StoreEvent,
    StoreFinished,
    StoreRequest,
    Tier,
)
from flare_core.testing.oracle_memory import OracleMemory

__all__ = ["MemoryPrefixStore", "StoreFaults"]

_SCRIBBLE = 0xA5


@dataclass(slots=True)
class StoreFaults:
    """What goes wrong, asked anew each time.

    Attributes:
        delay_polls: polls that a transfer takes beyond the first in which it may begin.
        drop_store: refuse a store (it returns None). fail_store: let it fail at its end.
        copies_early: a store reads as soon as it may, instead of at its end.
        lookup_polls: polls that a lookup takes before it may be asked; None: none has to be waited for.
        keep_sections: of so many sections to fetch, how many arrive.
    """

    delay_polls: Callable[[], int] = lambda: 0
    drop_store: Callable[[], bool] = lambda: False
    fail_store: Callable[[], bool] = lambda: False
    copies_early: Callable[[], bool] = lambda: False
    lookup_polls: Callable[[], int | None] = lambda: None
    keep_sections: Callable[[int], int] = lambda count: count


@dataclass(frozen=True, slots=True)
class _Page:
    """One page on every rank; ``tokens`` are those that are valid in it."""

    tokens: bytes
    shards: tuple[bytes, ...]


@dataclass(slots=True)
class _Node:
    """What follows a chain key: partial pages, and rows by the tail they stand behind."""

    tails: list[_Page] = field(default_factory=list)
    rows: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    next_keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Fetch:
    ticket: int
    after_step: int
    polls_left: int
    query: PrefixQuery
    sources: list[_Page]
    num_tokens: int
    pages: Sequence[int]
    row_slot: int | None
    row: tuple[bytes, ...] | None
    has_begun: bool = False
    is_cancelled: bool = False


@dataclass(slots=True)
class _Store:
    ticket: int
    after_step: int
    polls_left: int
    request: StoreRequest
    copies_early: bool
    copied: _Copied | None = None
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class _Copied:
    """What a store has read: whole pages that are new, by index; the tail; the row on every rank."""

    pages: dict[int, _Page]
    tail: _Page | None
    row: tuple[bytes, ...] | None


class MemoryPrefixStore:
    """Implements ``PrefixStore``, and rank zero's ``JobGate``. ``memories`` are those of all ranks."""

    def __init__(
        self, memories: Sequence[OracleMemory], *, tier: Tier = Tier.DISK, faults: StoreFaults | None = None
    ) -> None:
        self.faults = faults or StoreFaults()
        self.num_stores = 0
        self.num_restored_tokens = 0
        self._memories = memories
        self._page_tokens = memories[0].geometry.page_tokens
        self._has_rows = memories[0].geometry.row_bytes > 0
        self._tier = tier
        self._pages: dict[bytes, _Page] = {}
        self._nodes: dict[bytes, _Node] = {}
        self._jobs: list[_Fetch | _Store] = []
        self._lookups: dict[int, int] = {}
        self._last_ticket = 0
        self._finished_step = 0
        self._finished_jobs: set[int] = set()
        self._poison: str | None = None

    # -- JobGate -------------------------------------------------------------------------------------------------

    def wait_for_jobs(self, jobs: Sequence[int]) -> None:
        """Fetches are reported only when they are over, so there is nothing to wait for."""
        if not self._finished_jobs.issuperset(jobs):
            raise AssertionError(f"a step needs jobs {jobs}, which have not finished")

    def step_finished(self, step: int) -> None:
        """Transfers that wait for steps up to ``step`` may begin."""
        self._finished_step = step
        self._begin_all()

    # -- PrefixStore ---------------------------------------------------------------------------------------------

    def prepare(self, query: PrefixQuery) -> int | None:
        """There may be somebody to ask, who takes his time; see ``PrefixStore``."""
        polls = self.faults.lookup_polls()
        if polls is None or not query.keys:
            return None
        self._last_ticket += 1
        self._lookups[self._last_ticket] = polls
        return self._last_ticket

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Nothing here is worth comparing with."""

    def lookup(self, query: PrefixQuery) -> Restorable:
        """The longest prefix held, in one segment."""
        sources, num_tokens, row = self._find(query)
        if num_tokens <= query.num_device_tokens:
            return Restorable((), query.num_device_tokens)
        first = query.num_device_pages
        record_key = query.keys[-1] if query.keys else query.root
        gained = num_tokens - query.num_device_tokens
        segment = Segment(record_key, self._tier, first, len(sources), first, gained, row is not None)
        return Restorable((segment,), num_tokens)

    def fetch(
        self,
        query: PrefixQuery,
        restorable: Restorable,
        *,
        pages: Sequence[int],
        row_slot: int | None,
        after_step: int,
    ) -> int:
        """Begin to restore; see ``PrefixStore``."""
        sources, num_tokens, row = self._find(query)
        if num_tokens != restorable.num_tokens or len(pages) != len(sources):
            raise AssertionError(f"{len(pages)} pages for {len(sources)} sections, {num_tokens} tokens")
        self._last_ticket += 1
        job = _Fetch(
            self._last_ticket,
            after_step,
            self.faults.delay_polls(),
            query,
            sources,
            num_tokens,
            list(pages),
            row_slot,
            row,
        )
        self._jobs.append(job)
        self._begin_all()
        return job.ticket

    def store(self, request: StoreRequest) -> int | None:
        """Begin to store; see ``PrefixStore``."""
        if self._is_stored(request) or self.faults.drop_store():
            return None
        self._last_ticket += 1
        delay = self.faults.delay_polls()
        job = _Store(self._last_ticket, request.after_step, delay, request, self.faults.copies_early())
        self._jobs.append(job)
        self._begin_all()
        return job.ticket

    def poll(self) -> Sequence[StoreEvent]:
        """Move every transfer on; the events of those that ended."""
        if self._poison is not None:
            raise Poisoned(self._poison)
        events: list[StoreEvent] = [LookupReady(ticket) for ticket, polls in self._lookups.items() if polls <= 0]
        self._lookups = {ticket: polls - 1 for ticket, polls in self._lookups.items() if polls > 0}
        for job in self._jobs.copy():
            if job.after_step > self._finished_step:
                continue
            if job.polls_left > 0 and not (isinstance(job, _Fetch) and job.is_cancelled and not job.has_begun):
                job.polls_left -= 1
                continue
            self._jobs.remove(job)
            self._finished_jobs.add(job.ticket)
            events.append(self._end_fetch(job) if isinstance(job, _Fetch) else self._end_store(job))
        return events

    def cancel(self, ticket: int) -> None:
        """Give up a fetch that has not begun."""
        for job in self._jobs:
            if isinstance(job, _Fetch) and job.ticket == ticket:
                job.is_cancelled = True

    def reset(self, tier: Tier) -> bool:
        """Forget everything, if ``tier`` is this store's."""
        if tier is self._tier:
            self._pages.clear()
            self._nodes.clear()
        return tier is self._tier

    def poison(self, reason: str) -> None:
        """From now on :meth:`poll` raises."""
        self._poison = reason

    # -- what is held --------------------------------------------------------------------------------------------

    def _find(self, query: PrefixQuery) -> tuple[list[_Page], int, tuple[bytes, ...] | None]:
        """Pages from the first that the device lacks, the tokens reached, and the row there."""
        size = 4 * self._page_tokens
        data = query.token_ids.tobytes()
        depth = query.num_device_pages
        sources: list[_Page] = []
        best: tuple[list[_Page], int, tuple[bytes, ...] | None] = ([], query.num_device_tokens, None)
        while True:
            node = self._nodes.get(query.keys[depth - 1] if depth else query.root)
            rest = data[depth * size : (depth + 1) * size]
            if node is not None:
                best = self._follow(node, rest, sources, depth, best)
            page = self._pages.get(query.keys[depth]) if depth < len(query.keys) else None
            if page is None or page.tokens != rest:
                return best
            sources.append(page)
            depth += 1
            if not self._has_rows and depth * self._page_tokens > best[1]:
                best = (list(sources), depth * self._page_tokens, None)

    def _follow(
        self,
        node: _Node,
        rest: bytes,
        sources: list[_Page],
        depth: int,
        best: tuple[list[_Page], int, tuple[bytes, ...] | None],
    ) -> tuple[list[_Page], int, tuple[bytes, ...] | None]:
        followers = node.tails + [self._pages[key] for key in node.next_keys if key in self._pages]
        start = depth * self._page_tokens
        if not self._has_rows:
            for page in followers:
                count = common_tokens(page.tokens, rest)
                if count and start + count > best[1]:
                    best = ([*sources, page], start + count, None)
            return best
        for tail, row in node.rows.items():
            num_tokens = start + len(tail) // 4
            pages = [page for page in followers if page.tokens.startswith(tail)][:1] if tail else []
            if rest.startswith(tail) and num_tokens > best[1] and (pages or not tail):
                best = ([*sources, *pages], num_tokens, row)
        return best

    def _is_stored(self, request: StoreRequest) -> bool:
        if not all(key in self._pages for key in request.keys):
            return False
        node = self._nodes.get(request.keys[-1] if request.keys else request.root, _Node())
        tail = _tail_bytes(request, self._page_tokens)
        has_tail = not tail or any(page.tokens.startswith(tail) for page in node.tails)
        return has_tail and (request.row_slot is None or tail in node.rows)

    # -- transfers -----------------------------------------------------------------------------------------------

    def _begin_all(self) -> None:
        for job in self._jobs:
            if job.after_step > self._finished_step or job.has_begun:
                continue
            if isinstance(job, _Fetch):
                if not job.is_cancelled:
                    job.has_begun = True
                    self._scribble(job)
            else:
                job.has_begun = True
                if job.copies_early:
                    job.copied = self._copy(job.request)

    def _scribble(self, job: _Fetch) -> None:
        for memory in self._memories:
            for page in job.pages:
                _fill(memory.page_segments(page))
            if job.row_slot is not None:
                _fill(memory.row_segments(job.row_slot))

    def _end_fetch(self, job: _Fetch) -> FetchFinished:
        device_tokens = job.query.num_device_tokens
        kept = self.faults.keep_sections(len(job.sources)) if job.has_begun else 0
        for page, source in list(zip(job.pages, job.sources, strict=True))[:kept]:
            for memory, shard in zip(self._memories, source.shards, strict=True):
                _write(memory.page_segments(page), shard)
        is_whole = kept == len(job.sources) and job.has_begun
        if is_whole and job.row is not None and job.row_slot is not None:
            for memory, shard in zip(self._memories, job.row, strict=True):
                _write(memory.row_segments(job.row_slot), shard)
        reached = (job.query.num_device_pages + kept) * self._page_tokens
        num_tokens = job.num_tokens if is_whole else max(device_tokens, reached)
        if not is_whole and self._has_rows:
            num_tokens = device_tokens
        gained = {self._tier: num_tokens - device_tokens} if num_tokens > device_tokens else {}
        self.num_restored_tokens += num_tokens - device_tokens
        row_restored = is_whole and job.row is not None
        return FetchFinished(job.ticket, num_tokens, gained, row_restored, (job.ticket,))

    def _end_store(self, job: _Store) -> StoreFinished:
        request = job.request
        if self.faults.fail_store():
            return StoreFinished(job.ticket, 0, "told to fail")
        self.num_stores += 1
        copied = job.copied or self._copy(request)
        previous = request.root
        for at, key in enumerate(request.keys):
            if at in copied.pages:
                self._pages.setdefault(key, copied.pages[at])
            node = self._nodes.setdefault(previous, _Node())
            if key not in node.next_keys:
                node.next_keys.append(key)
            previous = key
        node = self._nodes.setdefault(previous, _Node())
        if copied.tail is not None:
            node.tails.append(copied.tail)
        if copied.row is not None:
            node.rows.setdefault(_tail_bytes(request, self._page_tokens), copied.row)
        return StoreFinished(job.ticket, 1)

    def _copy(self, request: StoreRequest) -> _Copied:
        size = self._page_tokens
        pages = {
            at: self._read(page, request.token_ids[at * size : at * size + size].tobytes())
            for at, (key, page) in enumerate(zip(request.keys, request.pages, strict=True))
            if key not in self._pages
        }
        tail = None
        tokens = _tail_bytes(request, size)
        if tokens and request.tail_page is not None:
            for memory in self._memories:
                if not memory.is_zero_behind(request.tail_page, len(tokens) // 4):
                    raise AssertionError(f"the tail in page {request.tail_page} has bytes behind its tokens")
            tail = self._read(request.tail_page, tokens)
        row = None
        if request.row_slot is not None:
            row = tuple(_read(memory.row_segments(request.row_slot)) for memory in self._memories)
        return _Copied(pages, tail, row)

    def _read(self, page: int, tokens: bytes) -> _Page:
        return _Page(tokens, tuple(_read(memory.page_segments(page)) for memory in self._memories))


def _tail_bytes(request: StoreRequest, page_tokens: int) -> bytes:
    num_tokens = len(request.token_ids)
    return request.token_ids[num_tokens // page_tokens * page_tokens :].tobytes()


def _read(segments: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(ctypes.string_at(address, length) for address, length in segments)


def _write(segments: Sequence[tuple[int, int]], data: bytes) -> None:
    at = 0
    for address, length in segments:
        ctypes.memmove(address, data[at : at + length], length)
        at += length


def _fill(segments: Sequence[tuple[int, int]]) -> None:
    for address, length in segments:
        ctypes.memset(address, _SCRIBBLE, length)
