"""Logs of a flare process on standard error: lines for people, or JSON. Owns the formats; set up once, in ``main``s."""

from __future__ import annotations

import json
import logging
import sys
import time

from flare_cli.rate_limit import RateLimit

__all__ = ["set_up_logs"]

_STRANGERS = frozenset({"uvicorn.error", "flare.http"})
_RESERVED = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def set_up_logs(*, as_json: bool, process: str) -> None:
    """Send all logs to standard error; ``process`` ("api", "rank 1") stands in every line."""
    target = logging.StreamHandler(sys.stderr)
    target.setFormatter(_JsonLines(process) if as_json else _Lines(process))
    target.addFilter(_Repeats())
    root = logging.getLogger()
    root.handlers[:] = [target]
    root.setLevel(logging.INFO)
    for noisy in ("uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _Repeats(logging.Filter):
    """Holds back what strangers can have written without end: the same text of the HTTP server, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = RateLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name not in _STRANGERS or record.exc_info:
            return True
        # These loggers write on the event loop's thread alone.
        held_back = self._limit.admit((record.name, record.msg), time.monotonic())
        if held_back:
            record.msg = f"{record.msg} (and {held_back} more like this before)"
        return held_back is not None


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
