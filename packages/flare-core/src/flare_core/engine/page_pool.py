"""Device pages by number: who may use which. Counts references and pins; knows neither tokens nor memory.

A page is in exactly one state: *free*; *held* (referenced by sequences or pinned by transfers); *cached* (neither, but
the prefix index knows what is in it); *quarantined* (a transfer of unknown outcome may still touch it: never reused).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["PagePool"]


class PagePool:
    """``num_pages`` pages, all free at first. A fault in the callers' counting raises ``AssertionError``."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_cached = 0
        self.num_quarantined = 0
        self.num_pinned_only = 0
        """Held by transfers alone: these pages come back without anyone's decision."""
        self._free = np.ones(num_pages, dtype=np.bool_)
        self._refs = [0] * num_pages
        self._pins = [0] * num_pages
        self._cached = bytearray(num_pages)
        self._quarantined = bytearray(num_pages)

    @property
    def num_held(self) -> int:
        """Pages that sequences reference or transfers pin."""
        return self.num_pages - self.num_free - self.num_cached - self.num_quarantined

    def is_idle(self, page: int) -> bool:
        """Nobody references or pins the page."""
        return not self._refs[page] and not self._pins[page] and not self._quarantined[page]

    def allocate(self, count: int) -> list[int] | None:
        """The ``count`` free pages with the lowest ids, referenced once each; None when fewer are free.

        Lowest first keeps the pages of a long prompt side by side, which transfers turn into few large copies.
        """
        if count > self.num_free:
            return None
        pages = [int(self._free.argmax())] if count == 1 else np.flatnonzero(self._free)[:count].tolist()
        self._free[pages] = False
        self.num_free -= count
        for page in pages:
            self._refs[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """One more reference to each of these held or cached pages."""
        for page in pages:
            self._enter(page)
            if self._pins[page] and not self._refs[page] and not self._quarantined[page]:
                self.num_pinned_only -= 1
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """One reference less to each; those that became cached, in the order given. Others became free or stay held."""
        idle: list[int] = []
        for page in pages:
            if self._refs[page] <= 0:
                raise AssertionError(f"page {page} is released more often than it was acquired")
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            if self._pins[page]:
                self.num_pinned_only += not self._quarantined[page]
            elif self._leave(page):
                idle.append(page)
        return idle

    def pin(self, pages: Iterable[int]) -> None:
        """A transfer begins to use these referenced pages."""
        for page in pages:
            if self._refs[page] <= 0:
                raise AssertionError(f"page {page} is pinned but not held")
            self._pins[page] += 1

    def unpin(self, pages: Iterable[int]) -> list[int]:
        """The transfer is over; returns the pages that became cached."""
        idle: list[int] = []
        for page in pages:
            if self._pins[page] <= 0:
                raise AssertionError(f"page {page} is unpinned more often than it was pinned")
            self._pins[page] -= 1
            if not self._pins[page] and not self._refs[page]:
                self.num_pinned_only -= not self._quarantined[page]
                if self._leave(page):
                    idle.append(page)
        return idle

    def set_cached(self, page: int, cached: bool) -> None:
        """The prefix index learnt or forgot what is in the page; an idle page that it forgets becomes free."""
        if bool(self._cached[page]) == cached:
            return
        if not cached and self.is_idle(page):
            self.num_cached -= 1
            self._set_free(page)
        self._cached[page] = cached

    def quarantine(self, pages: Sequence[int]) -> None:
        """Never hand these held pages out again, whatever is released later."""
        for page in pages:
            if not self._refs[page] and not self._pins[page]:
                raise AssertionError(f"page {page} is quarantined but not held")
            if self._quarantined[page]:
                continue
            if not self._refs[page]:
                self.num_pinned_only -= 1
            self._quarantined[page] = 1
            self.num_quarantined += 1

    def check(self) -> None:
        """Recount everything; raises ``AssertionError`` where free + held + cached + quarantined is not the total."""
        used = [bool(refs or pins) for refs, pins in zip(self._refs, self._pins, strict=True)]
        counts = [0, 0, 0, 0]
        pinned_only = 0
        for page in range(self.num_pages):
            if self._quarantined[page]:
                state = 3
            elif used[page]:
                state = 1
                pinned_only += not self._refs[page]
            else:
                state = 0 if self._free[page] else 2
                if state and not self._cached[page]:
                    raise AssertionError(f"page {page} leaked")
            if state and self._free[page]:
                raise AssertionError(f"page {page} is free and in use")
            counts[state] += 1
        expected = [self.num_free, self.num_held, self.num_cached, self.num_quarantined]
        if counts != expected:
            raise AssertionError(f"free, held, cached, quarantined are {counts}, counted as {expected}")
        if pinned_only != self.num_pinned_only:
            raise AssertionError(f"pinned only: {pinned_only}, counted as {self.num_pinned_only}")

    def _enter(self, page: int) -> None:
        if not self._refs[page] and not self._pins[page] and not self._quarantined[page]:
            if not self._cached[page]:
                raise AssertionError(f"page {page} is acquired but neither held nor cached")
            self.num_cached -= 1

    def _leave(self, page: int) -> bool:
        """The last reference and pin are gone; True when the page stays cached."""
        if self._quarantined[page]:
            return False
        if self._cached[page]:
            self.num_cached += 1
            return True
        self._set_free(page)
        return False

    def _set_free(self, page: int) -> None:
        self._free[page] = True
        self.num_free += 1
