"""One rank's disk: files whose written bytes and names become durable only when synced, and power cuts.

Holds state that outlives processes. What a power cut leaves of unsynced 4 KiB sectors, sizes and directory operations
is drawn; how calls on it fail is :mod:`flare_qualify.sim.files`'s business.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

__all__ = ["SECTOR_BYTES", "Inode", "SimDisk"]

SECTOR_BYTES = 4096


@dataclass(slots=True, eq=False)
class Inode:
    """A file.

    Attributes:
        data: what reads see.
        durable: what a power cut cannot take.
        dirty: sectors of ``data`` that were written since.
        version: rises with every change.
        is_damaged: a fault changed or lost bytes of it: it may be refused, and must never be believed.
        sync_failed: an fsync of it failed; it must not be synced again.
    """

    number: int
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    dirty: set[int] = field(default_factory=set)
    version: int = 0
    mtime_ns: int = 0
    is_damaged: bool = False
    sync_failed: bool = False

    def touch(self, start: int, end: int) -> None:
        """Bytes [start, end) were written or cut."""
        self.dirty.update(range(start // SECTOR_BYTES, -(-end // SECTOR_BYTES)))
        self.version += 1

    def sync(self) -> None:
        """Everything is durable."""
        self.durable = bytes(self.data)
        self.dirty.clear()

    def lose_power(self, rng: Random) -> None:
        """Keep what was durable and a drawn part of what was not."""
        if not self.dirty and len(self.durable) == len(self.data):
            return
        size = rng.choice((len(self.data), len(self.data), len(self.durable)))
        kept = bytearray(self.durable[:size])
        kept.extend(bytes(size - len(kept)))
        odds = rng.choice((0.0, 0.5, 0.9))
        for sector in sorted(self.dirty):
            start = sector * SECTOR_BYTES
            end = min(start + SECTOR_BYTES, size, len(self.data))
            if start < end and rng.random() < odds:
                kept[start:end] = self.data[start:end]
        if kept != self.data:
            self.is_damaged = True
        self.data = kept
        self.version += 1
        self.sync()


@dataclass(slots=True)
class SimDisk:
    """One directory.

    Attributes:
        rank: whose.
        names: what processes see.
        durable_names: what a power cut cannot take; ``journal`` leads from there to ``names``.
        excused: names on which a fault was injected: what became of them later may be a loss.
        cut: names that a power cut took or changed: a loss only where power cuts are survived.
        is_full: writes find no space.
    """

    rank: int
    names: dict[str, Inode] = field(default_factory=dict)
    durable_names: dict[str, Inode] = field(default_factory=dict)
    journal: list[tuple[str, Inode | None]] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    is_full: bool = False
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(11))

    def new_inode(self) -> Inode:
        """A file without a name."""
        return Inode(next(self._numbers))

    def set_name(self, name: str, inode: Inode | None) -> None:
        """``name`` now means ``inode``, or nothing."""
        if inode is None:
            del self.names[name]
        else:
            self.names[name] = inode
        self.journal.append((name, inode))

    def sync_names(self) -> None:
        """Every name is durable."""
        self.durable_names = dict(self.names)
        self.journal.clear()

    def records(self) -> dict[str, Inode]:
        """Files with a record's name."""
        return {name: inode for name, inode in self.names.items() if name.endswith(".rec")}

    def lose_power(self, rng: Random) -> None:
        """Names fall back to what was durable and a drawn part of what came after; so do the files' bytes."""
        before = dict(self.names)
        names = dict(self.durable_names)
        if rng.random() < 0.7:
            kept = self.journal[: rng.randint(0, len(self.journal))]
        else:
            kept = [change for change in self.journal if rng.random() < 0.5]
        for name, inode in kept:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode
        self.names = names
        self.sync_names()
        for inode in {id(inode): inode for inode in names.values()}.values():
            inode.lose_power(rng)
        self.cut.update(name for name in before if names.get(name) is not before[name])
        self.cut.update(name for name, inode in names.items() if inode.is_damaged or name not in before)
