"""Ends a rank's process within a second, whatever its other threads are blocked in: a collective, the disk, the device.

Knows how to end; not why: whoever sees a loss calls ``doom``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from flare_cli.exit_codes import EXIT_LOST
from flare_core.errors import PoisonReason

__all__ = ["Watchdog"]

_LOG = logging.getLogger("flare")

CONSEQUENCE_SECONDS = 0.3
GRACE_SECONDS = 0.5
"""Between the verdict and the end: the word to the API process and the log line have this long to get out."""


class Watchdog:
    """One per process. ``tell`` receives the reason first, once; it must not block."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._doomed = threading.Event()
        self._is_disarmed = False

    def start(self) -> None:
        """Start the thread that ends the process; it never enters torch, and holds no lock."""
        threading.Thread(target=self._end, name="flare watchdog", daemon=True).start()

    def doom(self, reason: str) -> None:
        """The group cannot go on. Returns at once; the first reason counts. May be called from any thread.

        ``reason`` begins with a ``PoisonReason``; what begins otherwise counts as internal.
        """
        with self._lock:
            if self._doomed.is_set() or self._is_disarmed:
                return
            self._doomed.set()
        self._tell(reason)
        _LOG.error("stopping: %s", reason)

    def fail(self, error: Exception, what: str) -> None:
        """The engine thread failed with ``error``. Where a rank was lost, that is only its consequence.

        A collective fails at the same moment as the link of the rank that was in it, so the link is given a moment to
        say so first. Call it in the exception's handler; blocks for that moment.
        """
        if not self._doomed.wait(CONSEQUENCE_SECONDS):
            _LOG.exception("%s failed", what)
            self.doom(f"{PoisonReason.INTERNAL}: {what} failed: {type(error).__name__}: {error}")

    def disarm(self) -> None:
        """The process is ending in order; what is lost from now on is no loss."""
        with self._lock:
            self._is_disarmed = True

    def _end(self) -> None:
        self._doomed.wait()
        # Not the logging lock's business: another thread may hold it, blocked on a full pipe.
        threading.Event().wait(GRACE_SECONDS)
        os._exit(EXIT_LOST)
