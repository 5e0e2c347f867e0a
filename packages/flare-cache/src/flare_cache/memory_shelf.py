"""Records in main memory: the same bytes, checks and operations as on disk (``--prefix-cache-memory``).

A record is one mapping of its own, given back to the system when it is unlinked. Rank zero plans what is held; the
limit here only turns a wrong plan into a failed job.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from flare_cache.digest import DIGEST_BYTES, section_digest
from flare_cache.host_memory import Passage, copy_views, new_mapping
from flare_cache.jobs import Job
from flare_cache.pool.shard_source import BytesShard, ShardReader, require_size
from flare_cache.record import FileLayout, Problem, RecordError, RecordHeader, decode_header, encode_header, file_layout
from flare_cache.transfer import Part, check_same_record, flat_views, job_items, split_parts, verify_items
from flare_core.geometry import Geometry
from flare_core.ports import PageMemory

__all__ = ["MemoryShelf"]

_PART_BYTES = 8 << 20


@dataclass(slots=True)
class _MemoryRecord:
    mapping: mmap.mmap
    header: RecordHeader
    size: int


@dataclass(slots=True)
class MemoryShelf:
    """One rank's records in memory.

    Attributes:
        geometry, set_fingerprint, passage: as on disk.
        limit_bytes: sum of record sizes that is never exceeded.
    """

    geometry: Geometry
    set_fingerprint: bytes
    passage: Passage
    limit_bytes: int
    _records: dict[bytes, _MemoryRecord] = field(default_factory=dict)
    _used_bytes: int = 0
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    @property
    def used_bytes(self) -> int:
        """Bytes of all records, those being stored included."""
        return self._used_bytes

    def _credit(self, num_bytes: int) -> None:
        with self._mutex:
            self._used_bytes -= num_bytes

    def _parts(self, job: Job, layout: FileLayout, memory: PageMemory) -> list[Part]:
        return split_parts(job_items(job, layout, memory), self.passage.part_bytes or _PART_BYTES)

    def _find(self, job: Job) -> _MemoryRecord:
        record = self._records.get(job.record.key)
        if record is None:
            raise RecordError(Problem.MISSING, job.record.key.hex()[:16])
        check_same_record(record.header.identity, job.record)
        return record

    def store(self, job: Job, memory: PageMemory) -> _MemoryStore:
        """Begin a store: take the memory."""
        layout = file_layout(job.record, page_bytes=self.geometry.page_bytes, row_stride=self.geometry.row_stride)
        if job.record.key in self._records:
            raise OSError(errno.EEXIST, "the record is in memory already")
        with self._mutex:
            if self._used_bytes + layout.row_end > self.limit_bytes:
                raise OSError(errno.ENOSPC, f"{self._used_bytes} of {self.limit_bytes} bytes of memory are used")
            self._used_bytes += layout.row_end
        try:
            mapping = new_mapping(layout.row_end)
        except BaseException:
            self._credit(layout.row_end)
            raise
        digests = bytearray(DIGEST_BYTES * layout.num_digests)
        return _MemoryStore(self, job, mapping, layout, self._parts(job, layout, memory), digests)

    def fetch(self, job: Job, memory: PageMemory) -> _MemoryFetch:
        """Begin a fetch: find the record."""
        record = self._find(job)
        parts = self._parts(job, record.header.layout, memory)
        needed = parts[-1][-1].offset + parts[-1][-1].num_bytes
        if record.size < needed:
            raise RecordError(Problem.TRUNCATED, f"{record.size} bytes where the job needs {needed}")
        return _MemoryFetch(self, record, parts)

    def open_shard(self, job: Job) -> ShardReader:
        """This rank's part of a record, to be put into the pool; the record is pinned meanwhile."""
        record = self._find(job)
        size = require_size(record.size, record.header.layout, job.extent)
        return BytesShard(memoryview(record.mapping)[:size], size)

    def truncate(self, job: Job) -> int:
        """Give the memory of the row, or of row and tail, back to the system."""
        record = self._find(job)
        layout = record.header.layout
        size = layout.tail_end if job.keep_tail else layout.pages_end
        given_back = max(0, record.size - size)
        if given_back:
            record.mapping.madvise(mmap.MADV_DONTNEED, size, given_back)
            record.size = size
            self._credit(given_back)
        return given_back

    def unlink(self, job: Job) -> int:
        """Forget the record."""
        if job.record.key not in self._records:
            return 0
        size = self._find(job).size
        del self._records[job.record.key]
        self._credit(size)
        return size


@dataclass(slots=True)
class _MemoryStore:
    shelf: MemoryShelf
    job: Job
    mapping: mmap.mmap
    layout: FileLayout
    parts: Sequence[Part]
    digests: bytearray

    def run(self, part: Part) -> None:
        """Copy and digest one part."""
        start, end = part[0].offset, part[-1].offset + part[-1].num_bytes
        with self.shelf.passage.outgoing([item.segments for item in part]) as window:
            copy_views([memoryview(self.mapping)[start:end]], flat_views(window))
        for item in part:
            stored = memoryview(self.mapping)[item.offset : item.offset + item.num_bytes]
            at = item.position * DIGEST_BYTES
            self.digests[at : at + DIGEST_BYTES] = section_digest(
                self.job.record.store_id, self.shelf.geometry.rank, index=item.index, payload=[stored]
            )

    def finish(self) -> int:
        """Write the header; the record is there from now on."""
        header = encode_header(
            self.job.record,
            self.job.token_ids,
            set_fingerprint=self.shelf.set_fingerprint,
            geometry=self.shelf.geometry,
            digests=bytes(self.digests),
        )
        self.mapping[: len(header)] = header
        self.shelf._records[self.job.record.key] = _MemoryRecord(
            self.mapping, decode_header(header), self.layout.row_end
        )
        return self.layout.row_end

    def abandon(self) -> bool:
        """Give the memory back."""
        self.shelf._credit(self.layout.row_end)
        return True


@dataclass(slots=True)
class _MemoryFetch:
    shelf: MemoryShelf
    record: _MemoryRecord
    parts: Sequence[Part]

    def run(self, part: Part) -> None:
        """Copy, verify and deliver one part."""
        start, end = part[0].offset, part[-1].offset + part[-1].num_bytes
        with self.shelf.passage.incoming([item.segments for item in part]) as window:
            copy_views(flat_views(window), [memoryview(self.record.mapping)[start:end]])
            verify_items(part, window, header=self.record.header, geometry=self.shelf.geometry)
            window.deliver()

    def finish(self) -> int:
        """Bytes copied."""
        return sum(item.num_bytes for part in self.parts for item in part)

    def abandon(self) -> bool:
        """Nothing to undo."""
        return True
