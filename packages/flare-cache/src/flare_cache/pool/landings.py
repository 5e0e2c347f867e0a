"""Shards that are being received: a buffer and an upload for each granted put. Buffers are used again.

A fresh mapping costs a page fault for every page that arrives; the buffer of a shard that memory did not keep serves
the next one. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from flare_cache.host_memory import aligned_buffer
from flare_cache.pool.core_words import Transfer
from flare_cache.pool.storage import PoolStorage, Upload

__all__ = ["Landing", "Landings"]

_ROUNDING = 2 << 20
_MAX_IDLE_BYTES = 512 << 20


@dataclass(slots=True)
class Landing:
    """One shard on its way: ``data`` is as long as the shard; ``buffer`` is what it lies in."""

    data: memoryview
    buffer: memoryview
    upload: Upload


@dataclass(slots=True)
class Landings:
    """See the module. ``storage``: where uploads go."""

    storage: PoolStorage
    _open: dict[bytes, Landing] = field(default_factory=dict)
    _idle: list[memoryview] = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def of(self, transfer: Transfer) -> Landing:
        """The transfer's, begun if it is new. Raises OSError where storage or memory gives no room."""
        with self._mutex:
            landing = self._open.get(transfer.id)
            if landing is None:
                upload = self.storage.begin(transfer.name, transfer.num_bytes)
                buffer = self._take(transfer.num_bytes)
                landing = self._open[transfer.id] = Landing(buffer[: transfer.num_bytes], buffer, upload)
            return landing

    def take(self, transfer: bytes) -> Landing | None:
        """The transfer's, which is the caller's to end now."""
        with self._mutex:
            return self._open.pop(transfer, None)

    def drop_all_but(self, is_granted: Callable[[bytes], bool]) -> None:
        """Abort the uploads of transfers that are void. Their buffers are left: a connection may still write to one."""
        with self._mutex:
            void = [self._open.pop(transfer) for transfer in list(self._open) if not is_granted(transfer)]
        for landing in void:
            landing.upload.abort()

    def use_again(self, landing: Landing) -> None:
        """Nobody reads or writes its buffer any more."""
        with self._mutex:
            if sum(map(len, self._idle)) + len(landing.buffer) <= _MAX_IDLE_BYTES:
                self._idle.append(landing.buffer)

    def _take(self, num_bytes: int) -> memoryview:
        fitting = [each for each in self._idle if num_bytes <= len(each) <= 2 * num_bytes + _ROUNDING]
        if not fitting:
            return aligned_buffer(-(-num_bytes // _ROUNDING) * _ROUNDING)
        best = min(fitting, key=len)
        # By identity: equal bytes are not the same memory.
        self._idle = [each for each in self._idle if each is not best]
        return best
