"""Collectives for ranks that are threads of one process, and the trivial one of a single rank."""

from __future__ import annotations

import threading

__all__ = ["SingleRank", "ThreadCollective", "thread_collectives"]


class SingleRank:
    """The collective of a world of one."""

    rank = 0
    world_size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """``data`` alone."""
        return [data]


class ThreadCollective:
    """One rank's end of a group whose ranks are threads; made by :func:`thread_collectives`.

    ``all_gather`` blocks until every rank has called; it raises ``threading.BrokenBarrierError`` once
    :meth:`abort` was called by any rank.
    """

    def __init__(self, rank: int, cells: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(cells)
        self._cells = cells
        self._barrier = barrier

    def all_gather(self, data: bytes) -> list[bytes]:
        """``data`` of every rank, by rank."""
        self._cells[self.rank] = data
        self._barrier.wait()
        gathered = list(self._cells)
        self._barrier.wait()
        return gathered

    def abort(self) -> None:
        """Wake every rank that waits with an error, and fail later calls."""
        self._barrier.abort()


def thread_collectives(world_size: int) -> list[ThreadCollective]:
    """The ends of one group, by rank."""
    cells = [b""] * world_size
    barrier = threading.Barrier(world_size)
    return [ThreadCollective(rank, cells, barrier) for rank in range(world_size)]
