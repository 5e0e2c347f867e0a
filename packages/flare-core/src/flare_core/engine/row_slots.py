"""Row slots by number: [0, max_sequences) belong to running sequences, those behind hold snapshots of rows.

A snapshot slot is free, held (pinned by transfers or about to be copied from) or cached (the prefix index knows it).
Models without rows use the sequence slots alone, as indices of the runner's tables.
"""

from __future__ import annotations

import heapq

__all__ = ["RowSlots"]


class RowSlots:
    """All slots are free at first."""

    def __init__(self, max_sequences: int, num_snapshots: int) -> None:
        self.max_sequences = max_sequences
        self.num_snapshots = num_snapshots
        self._free_sequences = list(range(max_sequences))
        self._free_snapshots = list(range(max_sequences, max_sequences + num_snapshots))
        self._holds: dict[int, int] = {}
        self._cached: dict[int, None] = {}
        self._quarantined: set[int] = set()

    @property
    def num_free_sequences(self) -> int:
        """Slots that a new sequence may take."""
        return len(self._free_sequences)

    def take_sequence(self) -> int:
        """The lowest free sequence slot; the caller has checked that there is one."""
        return heapq.heappop(self._free_sequences)

    def free_sequence(self, slot: int) -> None:
        """A sequence's slot may be taken again."""
        if slot in self._free_sequences:
            raise AssertionError(f"slot {slot} is freed twice")
        heapq.heappush(self._free_sequences, slot)

    def take_snapshot(self) -> int | None:
        """The lowest free snapshot slot, held once; None when none is free."""
        if not self._free_snapshots:
            return None
        slot = heapq.heappop(self._free_snapshots)
        self._holds[slot] = 1
        return slot

    def oldest_cached(self) -> int | None:
        """The cached snapshot slot that nobody holds and that was used longest ago."""
        return next((slot for slot in self._cached if slot not in self._holds), None)

    def hold(self, slot: int) -> None:
        """One more user of a snapshot slot."""
        self._holds[slot] = self._holds.get(slot, 0) + 1

    def drop(self, slot: int) -> None:
        """One user less; a slot that is neither held nor cached becomes free."""
        left = self._holds[slot] - 1
        if left:
            self._holds[slot] = left
        else:
            del self._holds[slot]
            self._maybe_free(slot)

    def set_cached(self, slot: int, cached: bool) -> None:
        """The prefix index learnt, used or forgot the snapshot; learning and using make it the youngest."""
        self._cached.pop(slot, None)
        if cached:
            self._cached[slot] = None
        else:
            self._maybe_free(slot)

    def quarantine(self, slot: int) -> None:
        """Never hand this slot out again."""
        self._quarantined.add(slot)

    def check(self, sequences_in_use: set[int]) -> None:
        """Raises ``AssertionError`` unless every slot is accounted for."""
        free = set(self._free_sequences)
        if not free.isdisjoint(sequences_in_use):
            raise AssertionError(f"slots {free & sequences_in_use} are free and in use")
        total = len(free) + len(sequences_in_use | {s for s in self._quarantined if s < self.max_sequences})
        if total != self.max_sequences:
            raise AssertionError(f"{total} of {self.max_sequences} sequence slots are accounted for")
        snapshots = set(self._free_snapshots) | set(self._holds) | set(self._cached) | self._quarantined
        num = len([slot for slot in snapshots if slot >= self.max_sequences])
        if num != self.num_snapshots:
            raise AssertionError(f"{num} of {self.num_snapshots} snapshot slots are accounted for")

    @property
    def num_held_snapshots(self) -> int:
        """Snapshot slots that transfers or copies use."""
        return len(self._holds)

    def _maybe_free(self, slot: int) -> None:
        if slot not in self._holds and slot not in self._cached and slot not in self._quarantined:
            heapq.heappush(self._free_snapshots, slot)
