"""Processes as faults see them: which belong to a rank, and stopping one so that it neither dies nor answers.

A rank started in a session of its own (``start_new_session``) is that session's processes, whatever they fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from flare_qualify.faults.commands import FaultError
from flare_qualify.process_facts import is_alive, process_state

__all__ = ["session_members", "stopped"]

_POLL_SECONDS = 0.01


def session_members(leader: int) -> list[int]:
    """Living processes of the session that ``leader`` leads."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return sorted(found)


@contextlib.contextmanager
def stopped(pid: int, *, timeout: float = 5.0) -> Iterator[str]:
    """Stop a process (every thread of it) and wait until it is; gives the evidence. It is continued afterwards.

    Raises:
        FaultError: there is no such process, or it did not stop within ``timeout`` seconds.
    """
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        raise FaultError(f"process {pid} cannot be stopped: it is gone") from None
    try:
        deadline = time.monotonic() + timeout
        while (state := process_state(pid)) != "T":
            if not is_alive(pid) or time.monotonic() >= deadline:
                raise FaultError(f"process {pid} did not stop: its state is {state or 'gone'}")
            time.sleep(_POLL_SECONDS)
        yield f"process {pid} is in state T"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
