"""System calls of a process made to fail, to take long, to lie, or to kill it, by ``strace``'s fault injection.

``strace`` counts the calls of each thread for itself: ``when="2"`` is the second such call of any thread. The trace it
writes is the evidence. A killed process is killed before the call has done anything.
"""

from __future__ import annotations

import contextlib
import re
import select
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flare_qualify.faults.commands import FaultError

__all__ = ["READ_PAGES", "WRITE_PAGES", "WRITE_SIDE_CALLS", "Injection", "Trace", "attached", "traced_command"]

READ_PAGES = ("preadv", "preadv2")
WRITE_PAGES = ("pwritev", "pwritev2")
"""What records are read and written by; which of the two is the C library's choice."""
WRITE_SIDE_CALLS = (
    *WRITE_PAGES, "pwrite64", "ftruncate", "fsync", "link", "linkat", "unlink", "unlinkat", "rename", "renameat"
)  # fmt: skip
"""Calls by which a record directory or a file in it changes; making a file is an ``openat`` on the directory."""

_ATTACH_SECONDS = 10.0
_FIRED = ("(INJECTED)", "(DELAYED)", "= ?")
_CALL = re.compile(r"(?:(\d+)\s+)?(?:\d+\.\d+ )?(\w+)\(")


@dataclass(frozen=True, slots=True)
class Injection:
    """What happens to which calls.

    Attributes:
        calls: names of system calls.
        action: as ``strace`` has it: ``signal=SIGKILL``, ``error=EIO``, ``delay_enter=500000`` (µs), ``retval=4096``.
        when: ``3`` for the third call of a thread, ``3+`` for it and all later ones, ``1..4`` for a range.
        paths: only calls on exactly these files or directories (by path, or by a descriptor of them); empty: all.
    """

    calls: Sequence[str]
    action: str
    when: str = "1"
    paths: Sequence[Path] = ()

    def options(self) -> list[str]:
        """Options of ``strace``."""
        calls = ",".join(self.calls)
        chosen = [word for path in self.paths for word in ("-P", str(path))]
        return [*chosen, "-e", f"trace={calls}", "-e", f"inject={calls}:{self.action}:when={self.when}"]


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls that ``strace`` has written down so far."""

    path: Path

    def lines(self) -> list[str]:
        """One call a line; empty before ``strace`` has begun."""
        return self.path.read_text(errors="replace").splitlines() if self.path.exists() else []

    def fired(self) -> list[str]:
        """Calls that were tampered with or never came back, and deaths by a signal."""
        return [line for line in self.lines() if line.endswith(_FIRED) or "+++ killed by" in line]

    def most_calls(self) -> Counter[str]:
        """For each call, how often the thread that made it most made it."""
        by_thread: Counter[tuple[str, str]] = Counter()
        for line in self.lines():
            found = _CALL.match(line)
            if found is not None and "resumed>" not in line:
                by_thread[found[1] or "", found[2]] += 1
        most: Counter[str] = Counter()
        for (_, call), count in by_thread.items():
            most[call] = max(most[call], count)
        return most


def traced_command(trace: Path, options: Sequence[str]) -> list[str]:
    """Words before a command that is to run under ``strace`` from its first instruction on.

    The command stays this process's child, with its own exit code; ``strace`` goes with it. With ``options`` of
    :meth:`Injection.options`, or ``-e trace=…`` to count only.
    """
    # The filter spares a stop at every other call; through it ``strace`` 6.1 does not send signals.
    is_signal = any("signal=" in option for option in options)
    return ["strace", "-D", "-f", "-q", *([] if is_signal else ["--seccomp-bpf"]), "-o", str(trace), *options]


@contextlib.contextmanager
def attached(pid: int, injection: Injection, trace: Path) -> Iterator[Trace]:
    """Inject into a process that runs already, and into all of its threads and their children; counting begins here.

    Raises:
        FaultError: ``strace`` could not attach.
    """
    command = ["strace", "-f", "-o", str(trace), *injection.options(), "-p", str(pid)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _await_attached(process, pid)
            yield Trace(trace)
        finally:
            # It detaches at SIGTERM; of a process that is dead it has taken leave already.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_ATTACH_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_attached(process: subprocess.Popen[bytes], pid: int) -> None:
    said, pipe = b"", process.stderr
    deadline = time.monotonic() + _ATTACH_SECONDS
    while pipe is not None and (left := deadline - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        piece = pipe.read1(4096) if hasattr(pipe, "read1") else b""
        said += piece
        if b"attached" in said:
            return
        if not piece:
            break
    raise FaultError(f"strace did not attach to process {pid}: {said.decode(errors='replace')[-300:]}")
