"""Puts weights on 2 MiB pages where the kernel leaves that to programs (``transparent_hugepage`` at "madvise").

A step of few rows streams every weight once; on 4 KiB pages a quarter of that time is address translation
(docs/decisions.md). Libraries allocate some of the weights out of reach, so the process's own memory map is read.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["collapse_large_mappings"]

_SMALLEST_BYTES = 32 << 20
"""Smaller mappings are not worth the copying."""

_LEAST_RESIDENT = 0.8
"""A mapping that is mostly untouched (a thread's stack, an idle pool) must not be filled."""

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ [0-9a-f:]+ 0\s*(?:\[heap\]|\[anon.*\])?$")


def collapse_large_mappings() -> int:
    """Move the process's large private mappings onto huge pages; gives the bytes asked for.

    Blocks while they are copied. Changes no content and no address. Does nothing where the system has no such advice
    or refuses it.
    """
    if sys.platform != "linux":
        return 0
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    asked = 0
    for start, size in _large_mappings(lines):
        if madvise(start, size, _MADV_HUGEPAGE) == 0:
            madvise(start, size, _MADV_COLLAPSE)  # before Linux 6.1 the kernel collapses them in its own time
            asked += size
    return asked


def _large_mappings(lines: list[str]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of anonymous private mappings that are large and resident, from the lines of ``smaps``."""
    current: tuple[int, int] | None = None
    for line in lines:
        if match := _HEADER.match(line):
            start, stop = int(match[1], 16), int(match[2], 16)
            current = (start, stop - start) if stop - start >= _SMALLEST_BYTES else None
        elif line.startswith("Rss:") and current is not None:
            if int(line.split()[1]) * 1024 >= _LEAST_RESIDENT * current[1]:
                yield current
            current = None
        elif "-" in line.split(" ", 1)[0]:
            current = None
