"""Where other threads leave commands for the engine thread, and what wakes it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from flare_core.engine.request import Command

__all__ = ["Inbox"]


class Inbox:
    """Thread-safe; unbounded, for the server bounds its requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._commands: list[Command] = []

    def put(self, commands: Sequence[Command]) -> None:
        """Leave commands, in order; never blocks."""
        with self._lock:
            self._commands.extend(commands)
        self._woken.set()

    def wake(self) -> None:
        """Have the engine look for events of its prefix store; never blocks."""
        self._woken.set()

    def drain(self) -> list[Command]:
        """Everything left since the last call; never blocks."""
        self._woken.clear()
        with self._lock:
            commands, self._commands = self._commands, []
        return commands

    def wait(self, timeout_seconds: float | None) -> None:
        """Block until something was put or :meth:`wake` was called since the last :meth:`drain`, or the time is up."""
        self._woken.wait(timeout_seconds)
