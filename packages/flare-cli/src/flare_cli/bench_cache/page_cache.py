"""The kernel's page cache, emptied before each timed read so that it reaches the disk."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["drop_page_cache", "page_cache_method"]

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def page_cache_method() -> str:
    """How :func:`drop_page_cache` works for this user, in words."""
    if os.access(_DROP_CACHES, os.W_OK):
        return "sync, then the whole page cache dropped"
    return "sync, then POSIX_FADV_DONTNEED on each record file (dropping the whole cache needs root)"


def drop_page_cache(directory: Path) -> None:
    """Write everything back, then drop the cached pages of the files under ``directory``, as root of all files."""
    os.sync()
    if os.access(_DROP_CACHES, os.W_OK):
        _DROP_CACHES.write_text("3")
        return
    for path in filter(Path.is_file, directory.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
