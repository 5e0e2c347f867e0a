"""The history of one scenario: an append-only file of events, one JSON object a line, flushed as they happen.

Everything that a run reports is a fold over these events (``verdict``), so that a run cut off at any moment can be
resumed and its counts still add up. Knows no event's meaning.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Event", "History", "read_history", "seal_history"]

Event = dict[str, Any]
"""``kind``, ``at`` (unix seconds) and the kind's own fields."""


@dataclass(slots=True)
class History:
    """Appends to ``path``. May be used from any thread; a line is written whole or, after a kill, cut at the end."""

    path: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, kind: str, **fields: Any) -> None:
        """Add one event; it has left the process when this returns.

        Raises:
            OSError: the disk is full or fails.
        """
        line = json.dumps({"kind": kind, "at": round(time.time(), 4)} | fields, default=str) + "\n"
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)


def read_history(path: Path) -> Iterator[Event]:
    """The events in ``path``, oldest first; none without a file. A line that a kill has cut short is left out.

    A line appended behind a cut one is lost with it, so :func:`seal_history` ends such a line first.
    """
    if not path.exists():
        return
    with path.open(errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "kind" in event:
                yield event


def seal_history(path: Path) -> None:
    """End a last line that a kill has cut short, so that the next event stands on a line of its own."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
