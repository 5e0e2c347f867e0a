"""Whether a restore from the pool is quicker than computing the same tokens, by what was measured. Pure.

A restore takes a latency and its bytes at a rate, both of the slowest rank; the other side is the prefill. Small
restores tell of the latency, large ones of the rate. Until a side is known a restore is tried, and one that seemed not
worth it is tried again now and then, as either side may have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BreakEven", "Rates"]

_WEIGHT = 0.3
"""Of the newest measurement."""
_PROBE_SECONDS = 30.0
_LARGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Rates:
    """None: not measured yet. The pool's are the slowest rank's; ``num_refused``: restores that were not worth it."""

    pool_seconds: float | None
    pool_bytes_per_second: float | None
    prefill_tokens_per_second: float | None
    num_refused: int


@dataclass(slots=True)
class BreakEven:
    """Moving averages. ``is_always``: whatever they say, restore."""

    is_always: bool = False
    _latency: float | None = None
    _rate: float | None = None
    _prefill: float | None = None
    _probe_at: float = 0.0
    _num_refused: int = 0

    @property
    def rates(self) -> Rates:
        """Now."""
        return Rates(self._latency, self._rate, self._prefill, self._num_refused)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """A restore of this many bytes on the largest rank has ended on the slowest after so long."""
        if num_bytes >= _LARGE_BYTES:
            moving = max(seconds - (self._latency or 0.0), seconds / 10)
            self._rate = _average(self._rate, num_bytes / max(moving, 1e-6))
        elif num_bytes > 0:
            moving = 0.0 if self._rate is None else num_bytes / self._rate
            self._latency = _average(self._latency, max(seconds - moving, 0.0))

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step that did nothing but prefill this many tokens took so long."""
        if num_tokens > 0 and seconds > 0:
            self._prefill = _average(self._prefill, num_tokens / seconds)

    def is_worth(self, *, num_tokens: int, num_bytes: int, now: float) -> bool:
        """Whether to restore tokens of this many bytes rather than compute them."""
        if self.is_always or self._prefill is None or (self._rate is None and self._latency is None):
            return True
        seconds = (self._latency or 0.0) + (0.0 if self._rate is None else num_bytes / self._rate)
        if seconds <= num_tokens / self._prefill:
            return True
        if now >= self._probe_at:
            self._probe_at = now + _PROBE_SECONDS
            return True
        self._num_refused += 1
        return False


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else (1 - _WEIGHT) * before + _WEIGHT * newest
