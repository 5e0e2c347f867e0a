"""Shards that the manager keeps in memory in front of its storage: those put or read last, within a limit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["MemoryTier"]


@dataclass(slots=True)
class MemoryTier:
    """Whole objects by name, the last used kept. Thread-safe. What is handed out stays valid when it leaves the tier.

    Attributes:
        limit_bytes: of all objects.
        num_bytes: held now.
    """

    limit_bytes: int
    num_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    _objects: OrderedDict[str, memoryview] = field(default_factory=OrderedDict)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def get(self, name: str) -> memoryview | None:
        """The object, as the last used."""
        with self._mutex:
            found = self._objects.get(name)
            if found is None:
                self.num_misses += 1
                return None
            self.num_hits += 1
            self._objects.move_to_end(name)
            return found

    def put(self, name: str, data: memoryview) -> bool:
        """Keep an object that nobody changes any more; False: it does not fit at all, and is not kept."""
        if len(data) > self.limit_bytes:
            return False
        with self._mutex:
            self._forget(name)
            while self.num_bytes + len(data) > self.limit_bytes:
                self._forget(next(iter(self._objects)))
            self._objects[name] = data
            self.num_bytes += len(data)
        return True

    def forget(self, names: Sequence[str]) -> None:
        """They are no more."""
        with self._mutex:
            for name in names:
                self._forget(name)

    def _forget(self, name: str) -> None:
        data = self._objects.pop(name, None)
        if data is not None:
            self.num_bytes -= len(data)
