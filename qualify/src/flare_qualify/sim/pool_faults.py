"""Faults of the pool. None of them may end a run, fail a request or restore a wrong byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from flare_cache.pool.messages import Commit, Find, Register
from flare_cache.record import RecordError, decode_header
from flare_qualify.sim.group import Group
from flare_qualify.sim.loop import EventLoop
from flare_qualify.sim.options import FaultKind
from flare_qualify.sim.pool_manager import SimManager

__all__ = ["PoolFaults", "heal_pool"]


def heal_pool(pool: SimManager) -> None:
    """It works from now on, and has room: one that is too small for a chain goes on evicting what was just put.

    What was damaged stays so.
    """
    if pool.limit_bytes is not None:
        pool.limit_bytes = None
        pool.crash()
    pool.start()
    pool.refusing.clear()
    pool.slowness, pool.storage.is_full = 1.0, False
    pool.dying_of = None


class PoolFaults:
    """Injects them."""

    def __init__(self, pool: SimManager, loop: EventLoop, rng: Random) -> None:
        self._pool = pool
        self._loop = loop
        self._rng = rng

    def actions(self) -> Mapping[FaultKind, Callable[[Group], None]]:
        """By kind."""
        return {
            FaultKind.POOL_CRASH: lambda _: self._crash(),
            FaultKind.POOL_CUT: lambda _: self._cut(),
            FaultKind.POOL_REFUSAL: self._refuse,
            FaultKind.POOL_SLOW: lambda _: self._slow(),
            FaultKind.POOL_FULL: lambda _: self._fill(),
            FaultKind.POOL_EVICTION: lambda _: self._evict(),
            FaultKind.POOL_ROT: lambda _: self._rot(),
        }

    def _later(self, what: str, call: Callable[[], None], *, most: float) -> None:
        self._loop.after(0.02 + most * self._rng.random(), f"the pool {what}", call)

    def _crash(self) -> None:
        if self._rng.random() < 0.5:
            self._pool.dying_of = self._rng.choice((Register, Find, Commit))
            if self._pool.dying_of is Register:
                self._cut()
        elif self._pool.is_up:
            self._pool.crash()
            self._later("is back", self._pool.start, most=self._rng.choice((0.01, 0.3, 2.0)))

    def _cut(self) -> None:
        if self._pool.connections:
            connection = self._rng.choice(self._pool.connections)
            connection.lose("it broke", seconds=self._rng.choice((0.001, 0.05, 6.0)) * self._rng.random())

    def _refuse(self, group: Group) -> None:
        self._pool.refusing.add(self._rng.randrange(len(group.processes)))
        self._cut()

    def _slow(self) -> None:
        pool = self._pool
        pool.slowness = self._rng.choice((0.1, 1.0, 15.0)) / pool.latency_seconds

        def recover() -> None:
            pool.slowness = 1.0

        self._later("is fast again", recover, most=1.0)

    def _fill(self) -> None:
        storage = self._pool.storage
        storage.is_full = True

        def empty() -> None:
            storage.is_full = False

        self._later("has space", empty, most=0.5)

    def _evict(self) -> None:
        manifests = self._pool.storage.manifests()
        if manifests:
            self._pool.condemn(self._rng.choice(manifests).record.key)

    def _rot(self) -> None:
        storage = self._pool.storage
        names = storage.shard_names()
        for name in names if self._rng.random() < 0.5 else self._rng.sample(names, min(1, len(names))):
            data = bytearray(storage.objects[name])
            data[self._place(bytes(data))] ^= 1 << self._rng.randrange(8)
            storage.objects[name] = bytes(data)
            storage.damaged.add(name)

    def _place(self, data: bytes) -> int:
        """Anywhere, or among the few bytes of a page that a token depends on."""
        try:
            header = decode_header(memoryview(data))
        except RecordError:
            return self._rng.randrange(len(data))
        if self._rng.random() < 0.3:
            return self._rng.randrange(len(data))
        return header.layout.section_offset(self._rng.randrange(header.layout.num_pages or 1)) + self._rng.randrange(8)
