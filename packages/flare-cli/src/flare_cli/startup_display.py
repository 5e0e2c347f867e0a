"""What a person sees while flare starts: a bar for what takes long, then a few lines on what was agreed.

On a terminal with rich; otherwise, and with JSON logs, as log lines. Knows no engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ["StartupDisplay"]

_LOG = logging.getLogger("flare")


class StartupDisplay:
    """Draws on standard error. ``close`` removes the bars; it may be called twice."""

    def __init__(self, *, as_json: bool) -> None:
        self._is_live = not as_json and sys.stderr.isatty()
        self._console = Console(stderr=True, highlight=False)
        self._as_json = as_json
        self._task: tuple[str, TaskID] | None = None
        self._seen: set[str] = set()
        self._progress: Progress | None = None

    def stage(self, text: str, num_done: int = 0, total: int = 0) -> None:
        """A stage began or went on."""
        if not self._is_live:
            if text not in self._seen:
                self._seen.add(text)
                _LOG.info("%s", text)
            return
        if self._progress is None:
            columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
        if self._task is None or self._task[0] != text:
            if self._task is not None:
                self._progress.remove_task(self._task[1])
            self._task = (text, self._progress.add_task(text, total=total or None))
        self._progress.update(self._task[1], completed=num_done, total=total or None)

    def ready(self, title: str, facts: Sequence[tuple[str, str]]) -> None:
        """The server takes requests."""
        self.close()
        if self._as_json:
            _LOG.info("%s", title, extra={"facts": dict(facts)})
            return
        width = max((len(label) for label, _ in facts), default=0)
        lines = [title, *(f"  {label:<{width}}  {text}" for label, text in facts)]
        # In one piece: ranks of one host may share a terminal.
        self._console.print("\n".join(lines), markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop drawing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
