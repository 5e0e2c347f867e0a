"""Logs of a flare process on standard error: lines for people, or JSON. Owns the formats; set up once, in ``main``s."""

from __future__ import annotations

import json
import logging
import sys
import time

__all__ = ["set_up_logs"]

_RESERVED = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def set_up_logs(*, as_json: bool, process: str) -> None:
    """Send all logs to standard error; ``process`` ("api", "rank 1") stands in every line."""
    target = logging.StreamHandler(sys.stderr)
    target.setFormatter(_JsonLines(process) if as_json else _Lines(process))
    root = logging.getLogger()
    root.handlers[:] = [target]
    root.setLevel(logging.INFO)
    for noisy in ("uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _Lines(logging.Formatter):
    """``12:00:01 rank 1 warning: text``"""

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s %(process_name)s%(level)s %(message)s", "%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        record.process_name = self._process
        record.level = "" if record.levelno <= logging.INFO else f" {record.levelname.lower()}:"
        return super().format(record)


class _JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, process, logger, text, and the record's extra fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "text": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _RESERVED}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
