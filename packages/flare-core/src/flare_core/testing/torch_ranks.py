"""Ranks of a torch model as threads of one process: collectives without sockets, for tests.

Loads no torch: it only calls methods of the tensors it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["ThreadCollectives", "run_ranks"]

_Result = TypeVar("_Result")
_TIMEOUT_SECONDS = 60.0


class ThreadCollectives:
    """One rank's collectives between threads; sums are made in the order of ranks. Made by :func:`run_ranks`."""

    def __init__(self, rank: int, *, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank = rank
        self.world_size = barrier.parties
        self.num_collectives = 0
        self._barrier = barrier
        self._slots = slots

    def all_reduce_(self, tensor: Any) -> None:
        """The sum over ranks, in place."""
        parts = self._exchange(tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(total)

    def all_gather(self, tensor: Any) -> Any:
        """[world_size, *shape], by rank."""
        parts = self._exchange(tensor)
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        for rank, part in enumerate(parts):
            gathered[rank].copy_(part)
        return gathered

    def _exchange(self, tensor: Any) -> list[Any]:
        self.num_collectives += 1
        self._slots[self.rank] = tensor.clone()
        self._barrier.wait(_TIMEOUT_SECONDS)
        parts = list(self._slots)
        self._barrier.wait(_TIMEOUT_SECONDS)
        return parts


def run_ranks(world_size: int, body: Callable[[int, ThreadCollectives], _Result]) -> list[_Result]:
    """Call ``body(rank, collectives)`` in one thread a rank; the results by rank. A rank's exception is raised."""
    barrier = threading.Barrier(world_size)
    slots: list[Any] = [None] * world_size

    def one_rank(rank: int) -> _Result:
        try:
            return body(rank, ThreadCollectives(rank, barrier=barrier, slots=slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one_rank, rank) for rank in range(world_size)]
    faults = [fault for future in futures if (fault := future.exception()) is not None]
    for fault in faults:
        if not isinstance(fault, threading.BrokenBarrierError):
            raise fault
    return [future.result() for future in futures]
