"""Starts the worker process. Light, so that it is started before the API process has imported what it serves with."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["LaunchedWorker", "launched_worker"]


@dataclass(frozen=True, slots=True)
class LaunchedWorker:
    """A running worker process, and this process's end of the socket pair to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket


@contextlib.contextmanager
def _ignored_signals() -> Iterator[None]:
    """A process started meanwhile ignores signals to end from its first instruction on: its parent's word counts."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def launched_worker() -> Iterator[LaunchedWorker]:
    """A worker that waits for its configuration; whatever happens, it does not outlive the context."""
    here, there = socket.socketpair()
    with there:
        command = [sys.executable, "-m", "flare_cli.worker_process", str(there.fileno())]
        with _ignored_signals():
            process = subprocess.Popen(command, pass_fds=(there.fileno(),), stdin=subprocess.DEVNULL)
    try:
        yield LaunchedWorker(process, here)
    finally:
        # Killed before its link ends, so that it does not report its parent's end as a loss.
        process.kill()
        process.wait()
        here.close()
