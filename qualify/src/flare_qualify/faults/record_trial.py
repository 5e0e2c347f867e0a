"""What became of the records of a :mod:`flare_qualify.faults.record_child`: what it said, and what is there afterwards.

Starts the child, under ``strace`` or not, and reads its directories back in this process. Knows no fault.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flare_cache.disk_shelf import Durability
from flare_cache.testing import LocalGroup
from flare_qualify.faults.record_child import record_plan, record_tokens

__all__ = ["Child", "Found", "read_back", "started_child"]

_END_SECONDS = 30.0


@dataclass(slots=True)
class Child:
    """A running or ended child. ``lines`` is what it has said so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read_until(self, word: str) -> bool:
        """Block until it says a line that begins so; False when it ended before."""
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip("\n"))
            if line.startswith(word):
                return True
        return False

    def wait(self) -> int:
        """Block until it has ended and all that it said is read; its exit code, negative for a signal."""
        self.lines += [line.rstrip("\n") for line in self.process.stdout or ()]
        return self.process.wait(_END_SECONDS)

    def kill(self) -> None:
        """SIGKILL, then as :meth:`wait`."""
        self.process.kill()
        self.wait()

    @property
    def stored(self) -> list[int]:
        """Numbers of the records that it reported as stored."""
        return [int(line.split()[1]) for line in self.lines if line.startswith("stored ")]

    @property
    def failed(self) -> list[str]:
        """What it said of stores that failed."""
        return [line for line in self.lines if line.startswith("failed ")]

    @property
    def refused(self) -> str:
        """Why it did not start; empty if it did, or died."""
        return next((line for line in self.lines if line.startswith("refused ")), "")


@contextlib.contextmanager
def started_child(
    root: Path,
    *,
    num_records: int,
    first: int = 0,
    world_size: int = 2,
    durability: Durability = Durability.PROCESS,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Start a child with ``prefix`` before its command; it has ended, one way or other, afterwards."""
    command = [*prefix, sys.executable, "-m", "flare_qualify.faults.record_child", str(root)]
    command += ["--world-size", str(world_size), "--durability", str(durability)]
    command += ["--first", str(first), "--num-records", str(num_records)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    with process:
        try:
            yield Child(process)
        finally:
            process.kill()


@dataclass(slots=True)
class Found:
    """What a join finds and restores of the records of a child.

    Attributes:
        restored: numbers restored whole. shortened: restored in part, with the tokens. missing: not there.
        wrong: restored with other bytes: must be empty.
        partial: names that some ranks have and others have not, after the join: must be empty.
        tokens, seconds: restored in all, and how long that took.
    """

    restored: list[int] = field(default_factory=list)
    shortened: dict[int, int] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def read_back(root: Path, numbers: Sequence[int], *, world_size: int = 2) -> Found:
    """Join, restore ``numbers`` and compare every byte on every rank. Blocks for it.

    Raises:
        FlareError, OSError: the group cannot start.
    """
    found = Found()
    group = LocalGroup.start(record_plan(root, world_size, num_threads=2))
    try:
        found.partial += _unequal(group)
        for number in numbers:
            tokens = record_tokens(number)
            if not group.lookup(tokens).num_tokens:
                found.missing.append(number)
                continue
            start = time.monotonic()
            try:
                restored = group.restore(tokens).num_tokens
            except AssertionError as error:  # how a local group tells of bytes that differ
                found.wrong.append(f"record {number}: {error}")
                continue
            found.tokens, found.seconds = found.tokens + restored, found.seconds + time.monotonic() - start
            if restored == len(tokens):
                found.restored.append(number)
            elif restored:
                found.shortened[number] = restored
            else:
                found.missing.append(number)
        group.settle()
        found.partial += _unequal(group)
    finally:
        group.close()
    return found


def _unequal(group: LocalGroup) -> list[str]:
    names = [set(rank.file_sizes()) for rank in group.ranks]
    everywhere = names[0].intersection(*names[1:])
    return sorted(names[0].union(*names[1:]) - everywhere)
