"""Which records of a local tier does the pool lack? Asked in chunks when a session begins. Pure.

So records that were stored while the pool was off, or by a process that died before it had put them, reach it late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flare_cache.pool.messages import Has, Presence, Reply

__all__ = ["CHUNK_KEYS", "Reconciliation"]

CHUNK_KEYS = 4096


class Reconciliation:
    """``keys``: in the order in which they are to be asked about, and put."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._unasked = deque(keys)
        self._asked: list[bytes] = []
        self._missing: deque[bytes] = deque()

    @property
    def is_asking(self) -> bool:
        """An answer is due."""
        return bool(self._asked)

    @property
    def is_over(self) -> bool:
        """Everything was asked, and what is missing was taken."""
        return not (self._unasked or self._asked or self._missing)

    @property
    def num_left(self) -> int:
        """Keys that were not asked about or, missing, not taken."""
        return len(self._unasked) + len(self._asked) + len(self._missing)

    def next_request(self) -> Has | None:
        """What to ask next; None when everything was asked."""
        if self._asked or not self._unasked:
            return None
        self._asked = [self._unasked.popleft() for _ in range(min(CHUNK_KEYS, len(self._unasked)))]
        return Has(keys=b"".join(self._asked))

    def answered(self, reply: Reply | None) -> list[tuple[bytes, bool]]:
        """For each key of the last request whether the pool has it; without an answer nothing more is asked."""
        asked, self._asked = self._asked, []
        if not isinstance(reply, Presence) or len(reply.present) != len(asked):
            self._unasked.clear()
            return []
        found = [(key, bool(is_there)) for key, is_there in zip(asked, reply.present, strict=True)]
        self._missing.extend(key for key, is_there in found if not is_there)
        return found

    def first_missing(self) -> bytes | None:
        """The next key that the pool lacks."""
        return self._missing[0] if self._missing else None

    def drop_first(self) -> None:
        """That key is taken, or not worth it."""
        self._missing.popleft()
