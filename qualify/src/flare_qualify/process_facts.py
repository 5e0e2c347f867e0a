"""Facts about processes of this host, from ``/proc``: whether one lives, its children, its state, its variables."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["children_of", "is_alive", "kill_marked", "process_state", "processes_with", "wait_gone"]

_PROC = Path("/proc")


def process_state(pid: int) -> str:
    """The letter that the kernel gives (R, S, D, T, Z…); empty when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs or is stopped; a zombie is not alive."""
    return process_state(pid) not in {"", "Z", "X"}


def children_of(pid: int) -> tuple[int, ...]:
    """Children of every thread of ``pid``, oldest first."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return tuple(sorted(found))


def wait_gone(pids: dict[str, int], *, timeout: float) -> dict[str, float]:
    """Block until none of ``pids`` is alive; seconds that each took, by name. Those still alive are missing."""
    start = time.monotonic()
    gone: dict[str, float] = {}
    while len(gone) < len(pids) and time.monotonic() - start < timeout:
        for name, pid in pids.items():
            if name not in gone and not is_alive(pid):
                gone[name] = time.monotonic() - start
        time.sleep(0.01)
    return gone


def processes_with(variable: str, value: str) -> Iterator[int]:
    """Live processes other than this one that were started with the environment variable at this value."""
    needle = f"{variable}={value}".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def kill_marked(variable: str, value: str) -> int:
    """SIGKILL the processes that :func:`processes_with` finds, however deep they were started; their number."""
    count = 0
    for pid in processes_with(variable, value):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            count += 1
    return count
