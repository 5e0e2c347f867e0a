"""When a tier stops storing or reading, and when it tries again: a full disk, a failing one. Pure.

Held by rank zero, for the group: a record is on every rank or on none, so that one rank's full or failing disk is
everyone's. Judges by the answers of the ranks alone; what is not stored or not looked up then is others' business.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flare_cache.job_times import reason_code
from flare_cache.outcomes import Done, Failed, Outcome, RankFailure
from flare_cache.record import Problem
from flare_core.prefix import Tier

__all__ = [
    "BAD_DIGEST_LIMIT",
    "BAD_DIGEST_SECONDS",
    "READ_ERROR_LIMIT",
    "READ_ERROR_SECONDS",
    "RETRY_SECONDS",
    "STORES_STOPPED",
    "TierHealth",
]

RETRY_SECONDS = 1.0
"""After a store found no place: one more is tried so much later, and others only when that one was stored."""

READ_ERROR_LIMIT = 3
READ_ERROR_SECONDS = 60.0
"""So many failed reads of one rank within this time, and the tier is not read any more."""

BAD_DIGEST_LIMIT = 3
BAD_DIGEST_SECONDS = 600.0
"""So many records of one rank that hold other bytes than were written, within this time: nothing is stored any more."""

STORES_STOPPED = "stores-stopped"
"""How a rank's reason begins when its directory takes nothing any more (a failed fsync)."""

_NO_PLACE = frozenset({"ENOSPC", "EDQUOT", "EFBIG", "EMFILE", "ENFILE", "EROFS", "ENOENT"})
"""No room, no descriptor, no writable or no directory any more: what may pass, and what every next store meets, too."""
_BAD_DIGEST = frozenset({Problem.SECTION_DIGEST, Problem.HEADER_DIGEST})
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TierHealth:
    """One tier of the group. Times are seconds of one monotonic clock.

    Attributes:
        tier: which, for messages.
        stores_stopped: why nothing is stored: until the next start, or, when ``is_paused``, until a store succeeds.
        reads_stopped: why nothing is looked up until the next start, or None.
        is_paused: some rank had no place for a record; one is tried every :data:`RETRY_SECONDS`.
    """

    tier: Tier
    stores_stopped: str | None = None
    reads_stopped: str | None = None
    is_paused: bool = False
    _retry_at: float = 0.0
    _probe: int | None = None
    _read_errors: dict[int, deque[float]] = field(default_factory=dict)
    _bad_digests: dict[int, dict[bytes, float]] = field(default_factory=dict)

    def refusal(self, now: float) -> str | None:
        """Why a store must not begin now, as a word for a counter; None: it may."""
        if self.stores_stopped is None:
            return None
        if not self.is_paused:
            return "stopped"
        return "paused" if self._probe is not None or now < self._retry_at else None

    def began(self, tag: int) -> None:
        """The store job ``tag`` was submitted."""
        if self.is_paused:
            self._probe = tag

    def ended(self, outcome: Outcome, now: float) -> None:
        """A store job has ended."""
        is_probe = outcome.tag == self._probe
        if is_probe:
            self._probe = None
        match outcome:
            case Done() if is_probe:
                self.is_paused = False
                self.stores_stopped = None
                _log.info("stores in the %s tier go on", self.tier)
            case Failed(failures=failures):
                for failure in failures:
                    self._store_failed(failure, now)

    def _store_failed(self, failure: RankFailure, now: float) -> None:
        code = reason_code(failure.reason)
        if code == STORES_STOPPED:
            self._stop_stores(f"rank {failure.rank}: {failure.reason}")
        elif code in _NO_PLACE and (self.is_paused or self.stores_stopped is None):
            if not self.is_paused:
                _log.warning("stores in the %s tier pause: rank %d: %s", self.tier, failure.rank, failure.reason)
            self.is_paused = True
            self.stores_stopped = f"paused, as rank {failure.rank} had no place: {failure.reason}"
            self._retry_at = now + RETRY_SECONDS

    def _stop_stores(self, reason: str) -> None:
        if self.stores_stopped is None or self.is_paused:
            self.is_paused = False
            self.stores_stopped = reason
            _log.error("nothing is stored in the %s tier any more until the next start: %s", self.tier, reason)

    def fetch_failed(self, key: bytes, failures: Iterable[RankFailure], now: float) -> None:
        """A fetch of the record ``key`` has failed on these ranks."""
        for failure in failures:
            code = reason_code(failure.reason)
            if code == Problem.READ_ERROR:
                self._read_failed(failure, now)
            elif code in _BAD_DIGEST:
                self._digest_differed(key, failure, now)

    def _read_failed(self, failure: RankFailure, now: float) -> None:
        times = self._read_errors.setdefault(failure.rank, deque(maxlen=READ_ERROR_LIMIT))
        times.append(now)
        is_over = len(times) == READ_ERROR_LIMIT and now - times[0] <= READ_ERROR_SECONDS
        if is_over and self.reads_stopped is None:
            self.reads_stopped = (
                f"rank {failure.rank} failed to read {READ_ERROR_LIMIT} times within {READ_ERROR_SECONDS:g} s, "
                f"last: {failure.reason}"
            )
            _log.error("the %s tier is not read any more until the next start: %s", self.tier, self.reads_stopped)

    def _digest_differed(self, key: bytes, failure: RankFailure, now: float) -> None:
        seen = self._bad_digests.setdefault(failure.rank, {})
        seen[key] = now
        for old in [known for known, at in seen.items() if now - at > BAD_DIGEST_SECONDS]:
            del seen[old]
        if len(seen) >= BAD_DIGEST_LIMIT:
            self._stop_stores(
                f"rank {failure.rank} returned other bytes than were written for {len(seen)} records within "
                f"{BAD_DIGEST_SECONDS:g} s, last: {failure.reason}"
            )
