"""Shards that are being received: a buffer and an upload for each granted put. Buffers are used again.

A fresh mapping costs a page fault for every page that arrives; the buffer of a shard that memory did not keep serves
the next one. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from flare_cache.host_memory import aligned_buffer
from flare_cache.pool.core_words import Transfer
from flare_cache.pool.shard_check import ShardCheck
from flare_cache.pool.storage import PoolStorage, Upload

__all__ = ["Landing", "Landings", "shard_check"]

_ROUNDING = 2 << 20
_MAX_IDLE_BYTES = 512 << 20


@dataclass(slots=True)
class Landing:
    """One shard on its way, an :class:`flare_cache.pool.storage.Upload` that writes behind.

    Attributes:
        data: as long as the shard. buffer: what it lies in. check: of what has come of it.
        upload: its way into storage. writers: threads that write to it.
    """

    data: memoryview
    buffer: memoryview
    check: ShardCheck
    upload: Upload
    writers: ThreadPoolExecutor
    _writes: list[Future[None]] = field(default_factory=list)

    def write(self, offset: int, view: memoryview) -> None:
        """Some bytes have come: they go on to storage while the connection takes the next. Does not block."""
        self._writes.append(self.writers.submit(self.upload.write, offset, view))

    def commit(self, data: memoryview) -> None:
        """Wait until storage has taken all that has come, and make it durable. Raises OSError."""
        wait(self._writes)
        for write in self._writes:
            write.result()
        self.upload.commit(data)

    def abort(self) -> None:
        """Nothing of it stays; what is still written goes to a file that is gone."""
        self.upload.abort()


@dataclass(slots=True)
class Landings:
    """See the module. ``storage``: where uploads go; ``writers``: threads that write to it."""

    storage: PoolStorage
    writers: ThreadPoolExecutor
    _open: dict[bytes, Landing] = field(default_factory=dict)
    _idle: list[memoryview] = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def of(self, transfer: Transfer) -> Landing:
        """The put's, begun if it is new. Raises OSError where storage or memory gives no room."""
        with self._mutex:
            landing = self._open.get(transfer.id)
            if landing is None:
                upload = self.storage.begin(transfer.name, transfer.num_bytes)
                buffer = self._take(transfer.num_bytes)
                data = buffer[: transfer.num_bytes]
                check = shard_check(transfer, data)
                landing = self._open[transfer.id] = Landing(data, buffer, check, upload, self.writers)
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
            landing.abort()

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


def shard_check(transfer: Transfer, data: memoryview) -> ShardCheck:
    """The check of what a put brings into ``data``."""
    assert transfer.record is not None  # noqa: S101 - a put has one
    return ShardCheck(
        data, transfer.record, transfer.extent, transfer.set_fingerprint, transfer.rank, transfer.world_size
    )
