"""This rank's own shard of a record, as the bytes that go to the pool: read from where the record is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flare_cache.jobs import Extent, Job
from flare_cache.record import FileLayout, Problem, RecordError

__all__ = ["BytesShard", "ShardReader", "ShardSource", "extent_bytes", "require_size"]


class ShardReader(Protocol):
    """An open shard. ``read`` may be called from several threads; it blocks and raises RecordError or OSError."""

    @property
    def num_bytes(self) -> int:
        """Size of the shard."""
        ...

    def read(self, offset: int, num_bytes: int, buffer: memoryview) -> memoryview:
        """A range, in ``buffer`` (aligned to 4096 bytes) or where it lies; offset and length are multiples of 4096."""
        ...

    def close(self) -> None:
        """Nothing is read any more."""
        ...


class ShardSource(Protocol):
    """A shelf from which shards are read. Thread-safe; blocks."""

    def open_shard(self, job: Job) -> ShardReader:
        """This rank's shard of the PUT job's record. Raises RecordError (missing, another, too short) or OSError."""
        ...


def extent_bytes(layout: FileLayout, extent: Extent) -> int:
    """Size of a shard that holds so much."""
    match extent:
        case Extent.PAGES:
            return layout.pages_end
        case Extent.TAIL:
            return layout.tail_end
        case Extent.ROW:
            return layout.row_end


def require_size(size: int, layout: FileLayout, extent: Extent) -> int:
    """The shard's size, where a file of ``size`` bytes holds it. Raises RecordError (TRUNCATED)."""
    needed = extent_bytes(layout, extent)
    if size < needed:
        raise RecordError(Problem.TRUNCATED, f"{size} bytes where a shard with its {extent} takes {needed}")
    return needed


@dataclass(frozen=True, slots=True)
class BytesShard:
    """A shard in memory."""

    data: memoryview
    num_bytes: int

    def read(self, offset: int, num_bytes: int, buffer: memoryview) -> memoryview:
        """Where it lies."""
        del buffer
        return self.data[offset : offset + num_bytes]

    def close(self) -> None:
        """The record is not pinned for this shard any more."""
