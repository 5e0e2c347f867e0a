"""Whether a restore from the pool is quicker than computing the same tokens, by what was measured. Pure.

The pool's rate is that of the slowest rank; the other side is the prefill. Until both are known a restore is tried, and
one that seemed not worth it is tried again now and then, as either side may have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BreakEven", "Rates"]

_WEIGHT = 0.3
"""Of the newest measurement in a rate."""
_PROBE_SECONDS = 30.0
_OVERHEAD_SECONDS = 0.002
"""Of a job, beside its bytes: two trips on record links and one to the manager."""


@dataclass(frozen=True, slots=True)
class Rates:
    """None: not measured yet. ``pool_bytes_per_second``: the slowest rank's; ``num_refused``: restores not worth it."""

    pool_bytes_per_second: float | None
    prefill_tokens_per_second: float | None
    num_refused: int


@dataclass(slots=True)
class BreakEven:
    """Rates as moving averages, weighted by what was moved, so that small jobs say little."""

    _pool: float | None = None
    _prefill: float | None = None
    _probe_at: float = 0.0
    _num_refused: int = 0

    @property
    def rates(self) -> Rates:
        """Now."""
        return Rates(self._pool, self._prefill, self._num_refused)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """A job of this many bytes on the largest rank took so long on the slowest."""
        if num_bytes > 0:
            rate = num_bytes / max(seconds - _OVERHEAD_SECONDS, 1e-6)
            self._pool = rate if self._pool is None else (1 - _WEIGHT) * self._pool + _WEIGHT * rate

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step that did nothing but prefill this many tokens took so long."""
        if num_tokens > 0 and seconds > 0:
            rate = num_tokens / seconds
            self._prefill = rate if self._prefill is None else (1 - _WEIGHT) * self._prefill + _WEIGHT * rate

    def is_worth(self, *, num_tokens: int, num_bytes: int, num_jobs: int, now: float) -> bool:
        """Whether to restore tokens of this many bytes, by this many jobs, rather than compute them."""
        if self._pool is None or self._prefill is None:
            return True
        seconds = num_bytes / self._pool + num_jobs * _OVERHEAD_SECONDS
        if seconds <= num_tokens / self._prefill:
            return True
        if now >= self._probe_at:
            self._probe_at = now + _PROBE_SECONDS
            return True
        self._num_refused += 1
        return False
