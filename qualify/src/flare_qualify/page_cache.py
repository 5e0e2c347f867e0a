"""The kernel's page cache, dropped before a measurement so that a read reaches the disk."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["can_drop_page_cache", "drop_page_cache"]

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def can_drop_page_cache() -> bool:
    """Only root can; without it only O_DIRECT reads can be compared."""
    return os.access(_DROP_CACHES, os.W_OK)


def drop_page_cache() -> None:
    """Drop clean pages, directory entries and inodes of the whole machine. Dirty pages stay: sync first."""
    _DROP_CACHES.write_text("3")
