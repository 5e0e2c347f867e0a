"""Processor time of this process and its children, which says whether the cores or the wires were the limit. Linux."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_seconds"]

_PARENT, _USER_TIME, _SYSTEM_TIME = 1, 11, 12
"""Fields of ``/proc/PID/stat`` behind the name (proc(5), where these are the 4th, 14th and 15th of all)."""


def cpu_seconds() -> float:
    """Of this process and its living children since they began; theirs in clock ticks of 10 ms."""
    own = os.times()
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[_PARENT]) == os.getpid():
            ticks += int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])
    return own.user + own.system + ticks / os.sysconf("SC_CLK_TCK")
