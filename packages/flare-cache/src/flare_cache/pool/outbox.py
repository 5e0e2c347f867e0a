"""Records on their way to the pool: which is next, which is given up. Bounded by bytes and time. Pure.

A record waits until what it extends is no longer in the box, since it is of no use, and not taken, without it. Each
record in the box is pinned in the tier that it is read from, so that it stays as it is until the pool has it. Used by
the engine's thread alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flare_cache.index import Record

__all__ = ["OutRecord", "Outbox"]

_MAX_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.5
_FOR_GOOD = ("failed", "parent")


@dataclass(slots=True, eq=False)
class OutRecord:
    """One record. ``num_tries``: puts or commits that failed while the pool was on."""

    record: Record
    num_bytes: int
    added_at: float
    num_tries: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class Outbox:
    """See the module.

    Attributes:
        limit_bytes: of records in the box, on the largest rank.
        seconds: a record is given up after so long in the box.
        pin, unpin: of the source tier.
        dropped: records that never reached the pool, by reason: "full", the budget; "late", the time; "failed", again
            and again; "gone" from the source tier; "parent", what it extends has no room, or cannot be put.
    """

    limit_bytes: int
    seconds: float
    pin: Callable[[Record], None]
    unpin: Callable[[Record], None]
    dropped: Counter[str] = field(default_factory=Counter)
    num_put: int = 0
    _waiting: list[tuple[int, int, OutRecord]] = field(default_factory=list)
    _by_parent: dict[bytes, list[OutRecord]] = field(default_factory=dict)
    _under_way: dict[bytes, OutRecord] = field(default_factory=dict)
    _keys: dict[bytes, OutRecord] = field(default_factory=dict)
    _num_bytes: int = 0
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Of all records in the box."""
        return self._num_bytes

    @property
    def num_under_way(self) -> int:
        """Records that are being put or committed."""
        return len(self._under_way)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def keys(self) -> list[bytes]:
        """Of all records in the box."""
        return list(self._keys)

    def has_room(self, record: Record) -> bool:
        """Whether the budget allows one more."""
        return self._num_bytes + record.num_bytes <= self.limit_bytes

    def add(self, record: Record, now: float) -> bool:
        """A record is to be put; False, and counted, when the budget does not allow it."""
        if record.key in self._keys:
            return True
        if not self.has_room(record):
            self.dropped["full"] += 1
            return False
        out = OutRecord(record, record.num_bytes, now)
        self.pin(record)
        self._keys[record.key] = out
        self._num_bytes += out.num_bytes
        self._wait(out)
        return True

    def next(self, now: float) -> OutRecord | None:
        """The record to put now; it is under way until :meth:`done`, :meth:`again` or :meth:`drop`."""
        paused: list[tuple[int, int, OutRecord]] = []
        found: OutRecord | None = None
        while self._waiting and found is None:
            entry = heapq.heappop(self._waiting)
            out = entry[2]
            if self._keys.get(out.record.key) is not out:
                continue
            if not out.record.is_usable:
                self.drop(out, "gone")
            elif self._awaits_parent(out):
                continue
            elif out.not_before > now:
                paused.append(entry)
            else:
                found = out
        for entry in paused:
            heapq.heappush(self._waiting, entry)
        if found is not None:
            self._under_way[found.record.key] = found
        return found

    def done(self, out: OutRecord) -> None:
        """The pool has it."""
        self.num_put += 1
        self._forget(out)

    def settle(self, key: bytes) -> None:
        """The pool has had it all along."""
        out = self._keys.get(key)
        if out is not None and key not in self._under_way:
            self._forget(out)

    def again(self, out: OutRecord, now: float, *, is_fault: bool) -> None:
        """It did not reach the pool: later once more, or never. ``is_fault``: though the pool was on."""
        self._under_way.pop(out.record.key, None)
        if is_fault:
            out.num_tries += 1
            out.not_before = now + _FIRST_PAUSE_SECONDS * 2 ** (out.num_tries - 1)
        if out.num_tries >= _MAX_TRIES:
            self.drop(out, "failed")
        else:
            self._wait(out)

    def drop(self, out: OutRecord, reason: str) -> None:
        """Give it up, and count it; what waited for a record that cannot be put is given up too."""
        given_up = [(out, reason)]
        while given_up:
            out, reason = given_up.pop()
            if reason in _FOR_GOOD:
                # Put again for their sake, it would fail again, for as long as they wait.
                given_up += [(child, "parent") for child in self._by_parent.pop(out.record.key, ())]
            if self._keys.get(out.record.key) is out:
                self.dropped[reason] += 1
                self._forget(out)

    def drop_late(self, now: float) -> None:
        """Give up what has been in the box for too long, unless it is under way."""
        for out in list(self._keys.values()):
            if now - out.added_at < self.seconds:
                return
            if out.record.key not in self._under_way:
                self.drop(out, "late")

    def _awaits_parent(self, out: OutRecord) -> bool:
        parent = out.record.parent
        if parent is None or parent.key not in self._keys:
            return False
        self._by_parent.setdefault(parent.key, []).append(out)
        return True

    def _wait(self, out: OutRecord) -> None:
        heapq.heappush(self._waiting, (out.record.first_page, next(self._serial), out))

    def _forget(self, out: OutRecord) -> None:
        key = out.record.key
        if self._keys.get(key) is out:
            del self._keys[key]
            self._under_way.pop(key, None)
            self._num_bytes -= out.num_bytes
            for child in self._by_parent.pop(key, ()):
                self._wait(child)
            self.unpin(out.record)
