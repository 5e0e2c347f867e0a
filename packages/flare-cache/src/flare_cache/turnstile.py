"""Runs one event at a time, in whatever thread brings it. Never blocks, starts no thread.

An acknowledgement that arrives on a link's thread is accounted for, and its consequences are sent, without a switch
to another thread: at world size 4 that is most of what a small job costs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Turnstile"]

Event = TypeVar("Event")


class Turnstile(Generic[Event]):
    """Hands events to ``handle``, in the order of :meth:`post`, never two at once.

    ``handle`` may post; it must neither block nor raise.
    """

    def __init__(self, handle: Callable[[Event], None]) -> None:
        self._handle = handle
        self._events: deque[Event] = deque()
        self._inside = threading.Lock()

    def post(self, event: Event) -> None:
        """Have ``event`` handled: here and now, or, if a thread is inside, by that thread before it leaves."""
        self._events.append(event)
        # Whoever leaves looks again, so an event that came while the lock was held is never left behind.
        while self._events and self._inside.acquire(blocking=False):
            try:
                while self._events:
                    self._handle(self._events.popleft())
            finally:
                self._inside.release()
