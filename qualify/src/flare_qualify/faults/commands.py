"""Runs the system's own tools (ip, mount, losetup, ...) for faults. Knows no fault."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["FaultError", "run", "write_control_file"]


class FaultError(Exception):
    """A fault could not be brought about or taken back; the message names the command and what it said."""


def run(*command: str | Path, timeout: float = 60.0) -> str:
    """Run a command and return what it printed. Blocks up to ``timeout`` seconds.

    Raises:
        FaultError: it is not there, failed, or did not end.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FaultError(f"{' '.join(words)}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise FaultError(f"{' '.join(words)} ended with {done.returncode}: {said[-500:]}")
    return done.stdout


def write_control_file(path: Path, text: str) -> None:
    """Write to a file of /proc or /sys. Raises FaultError with the kernel's reason."""
    try:
        path.write_text(text)
    except OSError as error:
        raise FaultError(f"{path}: {text!r}: {error.strerror}") from error
