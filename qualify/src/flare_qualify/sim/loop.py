"""Virtual time: a heap of events and the digest of their log. Knows nothing of what the events do."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable

__all__ = ["EventLoop", "Violation"]

_HASH_EVERY = 64


class Violation(BaseException):
    """A rule was broken; ``rule`` names it in a few words, the message says how.

    Not an ``Exception``: the machines' own boundaries must not take it for a failed job.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class EventLoop:
    """Events in the order of their time, those of one time in the order in which they were added."""

    def __init__(self, *, keep_log: bool = False) -> None:
        self.now = 0.0
        self.num_events = 0
        self.kept: list[str] | None = [] if keep_log else None
        self._heap: list[tuple[float, int, str, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._hash = hashlib.sha256()
        self._lines: list[str] = []

    def clock(self) -> float:
        """Virtual monotonic seconds."""
        return self.now

    def after(self, seconds: float, kind: str, call: Callable[[], None]) -> None:
        """Have ``call`` run ``seconds`` from now."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._serial), kind, call))

    def at(self, when: float, kind: str, call: Callable[[], None]) -> None:
        """Have ``call`` run at ``when``, not before now."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._serial), kind, call))

    def note(self, line: str) -> None:
        """A line of the log, at this time."""
        self._lines.append(f"{self.now:.6f} {line}")
        if self.kept is not None:
            self.kept.append(self._lines[-1])
        if len(self._lines) >= _HASH_EVERY:
            self._flush()

    def run_next(self) -> bool:
        """Run one event; False when there is none."""
        if not self._heap:
            return False
        self.now, _, kind, call = heapq.heappop(self._heap)
        self.num_events += 1
        self.note(kind)
        call()
        return True

    def digest(self) -> str:
        """SHA-256 of the log so far, hexadecimal."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        if self._lines:
            self._hash.update("\n".join(self._lines).encode() + b"\n")
            self._lines.clear()
