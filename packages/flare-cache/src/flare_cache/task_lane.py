"""Tasks that wait for a thread, and the threads that run them: one lane for shelves, one for the pool.

A lane's tasks never wait for another lane's threads, so that a slow pool does not delay a disk. What a task does is not
known here.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["TaskLane", "TaskOrder"]

TaskOrder = tuple[int, int]
"""Urgency, then job: a lane runs the least first, so that a job begun first is ended first."""


@dataclass(slots=True)
class TaskLane:
    """One lane. ``mutex`` is its owner's, which holds it around :meth:`push` and :meth:`stop`.

    Attributes:
        name: of its threads.
        num_threads: that run its tasks; 0 where somebody else does, by :meth:`run_one`.
    """

    name: str
    num_threads: int
    mutex: threading.Lock
    _tasks: list[tuple[TaskOrder, int, Callable[[], None]]] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=itertools.count)
    _threads: list[threading.Thread] = field(default_factory=list)
    _changed: threading.Condition = field(init=False)
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self.mutex)

    @property
    def num_tasks(self) -> int:
        """Tasks that wait for a thread."""
        return len(self._tasks)

    def start(self) -> None:
        """Start the threads. Raises RuntimeError: the system gives none."""
        for number in range(self.num_threads):
            thread = threading.Thread(target=self._work, name=f"{self.name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def push(self, order: TaskOrder, task: Callable[[], None]) -> None:
        """Have ``task`` run. With the mutex held."""
        heapq.heappush(self._tasks, (order, next(self._serial), task))
        self._changed.notify()

    def run_one(self) -> bool:
        """Run the first task that waits, in the caller's thread; False when there is none. Blocks for the task."""
        with self.mutex:
            if not self._tasks:
                return False
            task = heapq.heappop(self._tasks)[2]
        task()
        return True

    def stop(self) -> None:
        """End the threads once no task waits. With the mutex held; does not block."""
        self._stopped = True
        self._changed.notify_all()

    def join(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline``, seconds of ``time.monotonic``; whether they have ended."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self.mutex:
                while not self._tasks:
                    if self._stopped:
                        return
                    self._changed.wait()
            # Another thread may have been faster; then the next turn waits again.
            self.run_one()
