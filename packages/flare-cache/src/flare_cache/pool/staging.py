"""Memory that the pool's bytes land in before they are verified and go on to pages. A fixed number of buffers.

A transfer that ends early says of its buffer that it is quiet (nothing writes to it any more) or that this is not
known; such a buffer is quarantined: it is never lent again, and its place stays empty. No page is ever at risk.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flare_cache.host_memory import aligned_buffer

__all__ = ["BufferState", "StagingBuffers", "allocate_staging"]


class BufferState(enum.Enum):
    """What is known of a buffer when its transfer was cancelled."""

    QUIET = "quiet"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class StagingBuffers:
    """Made by :func:`allocate_staging`. Thread-safe.

    Attributes:
        sizes: bytes of each buffer; what a rank registers.
        num_quarantined: buffers that are lost to unknown transfers.
    """

    sizes: tuple[int, ...]
    num_quarantined: int = 0
    _idle: list[memoryview] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, deadline: float) -> memoryview:
        """A buffer of one's own. Blocks until one is idle.

        Raises:
            TimeoutError: none was idle by ``deadline`` (monotonic seconds).
        """
        with self._changed:
            while not self._idle:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    msg = f"no staging buffer was idle in time ({self.num_quarantined} are quarantined)"
                    raise TimeoutError(msg)
                self._changed.wait(remaining)
            return self._idle.pop()

    def give_back(self, buffer: memoryview, state: BufferState) -> None:
        """The transfer has ended; one that is not known to be quiet keeps its buffer for ever."""
        with self._changed:
            if state is BufferState.UNKNOWN:
                self.num_quarantined += 1
                return
            self._idle.append(buffer)
            self._changed.notify()


def allocate_staging(num_buffers: int, buffer_bytes: int) -> StagingBuffers:
    """``num_buffers`` buffers of ``buffer_bytes``, aligned to 4096. Raises OSError where there is no memory."""
    buffers: Sequence[memoryview] = [aligned_buffer(buffer_bytes) for _ in range(num_buffers)]
    return StagingBuffers(sizes=(buffer_bytes,) * num_buffers, _idle=list(buffers))
