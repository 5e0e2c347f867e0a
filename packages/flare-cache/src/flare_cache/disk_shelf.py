"""Records on disk: store, fetch, truncate and unlink in one rank's record directory.

A store writes a temporary file, its header last, and gives it its name only when it is whole; whatever goes wrong
before, nothing of it stays. A fetch reads straight into what the passage lends and hands nothing over that has not
been verified. Which job may run when is not decided here.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flare_cache.digest import DIGEST_BYTES, section_digest
from flare_cache.directory import RecordDirectory, temporary_name
from flare_cache.directory_files import DirectoryFiles
from flare_cache.host_memory import Passage, aligned_buffer
from flare_cache.jobs import Job, record_file_name
from flare_cache.pool.shard_source import ShardReader, require_size
from flare_cache.record import (
    FileLayout,
    Problem,
    RecordError,
    RecordHeader,
    check_header,
    encode_header,
    file_layout,
)
from flare_cache.record_file import DiskTransport, probe_direct, read_header, read_sections, write_sections
from flare_cache.tier_health import STORES_STOPPED
from flare_cache.transfer import Part, check_same_record, flat_views, job_items, split_parts, verify_items
from flare_core.geometry import Geometry
from flare_core.ports import PageMemory
from flare_transport.failpoint import failpoint

__all__ = ["DEFAULT_PART_BYTES", "DiskShelf", "Durability", "use_direct"]

DEFAULT_PART_BYTES = 8 << 20
_PROBE_NAME = temporary_name(bytes(32), bytes(16))


class Durability(enum.StrEnum):
    """What a reported record outlives (``--prefix-cache-durability``): any process's death, or a power cut too."""

    PROCESS = "process"
    POWER = "power"


def use_direct(directory: RecordDirectory, transport: DiskTransport) -> bool:
    """Whether records of this directory go by O_DIRECT; ``DiskTransport.AUTO`` tries it.

    Raises:
        UsageError: DIRECT where the file system refuses it.
        OSError: the directory cannot be written.
    """
    return probe_direct(directory.files, _PROBE_NAME, transport=transport, path=str(directory.path))


@dataclass(frozen=True, slots=True)
class DiskShelf:
    """One rank's records on disk.

    Attributes:
        directory: open and locked.
        geometry: this rank's.
        set_fingerprint: the record set.
        passage: way to and from page memory.
        direct: O_DIRECT (see :func:`use_direct`).
        durability: whether stores wait for the disk.
        part_bytes: bytes of one read or write call; a job is split into parts of this size.
    """

    directory: RecordDirectory
    geometry: Geometry
    set_fingerprint: bytes
    passage: Passage
    direct: bool
    durability: Durability = Durability.PROCESS
    part_bytes: int = DEFAULT_PART_BYTES

    def layout(self, job: Job) -> FileLayout:
        """Sizes of the job's file on this rank."""
        return file_layout(job.record, page_bytes=self.geometry.page_bytes, row_stride=self.geometry.row_stride)

    def _parts(self, job: Job, layout: FileLayout, memory: PageMemory) -> list[Part]:
        part_bytes = min(self.part_bytes, self.passage.part_bytes or self.part_bytes)
        return split_parts(job_items(job, layout, memory), part_bytes)

    def store(self, job: Job, memory: PageMemory) -> DiskStore:
        """Begin a store: create its temporary file."""
        failpoint("store.begin")
        if self.directory.stores_stopped is not None:
            raise OSError(f"{STORES_STOPPED}: {self.directory.stores_stopped}")
        layout = self.layout(job)
        name = temporary_name(job.record.key, job.record.store_id)
        parts = self._parts(job, layout, memory)
        digests = bytearray(DIGEST_BYTES * layout.num_digests)
        failpoint("store.create")
        fd = self.directory.create_temporary(name, direct=self.direct, num_bytes=layout.row_end)
        return DiskStore(shelf=self, job=job, fd=fd, temporary=name, layout=layout, parts=parts, digests=digests)

    def fetch(self, job: Job, memory: PageMemory) -> DiskFetch:
        """Begin a fetch: open the file and check its header and size."""
        failpoint("fetch.begin")
        layout = self.layout(job)
        failpoint("fetch.open")
        files = self.directory.files
        fd = self.directory.open_record(record_file_name(job.record.key), direct=self.direct)
        try:
            failpoint("fetch.header")
            header = read_header(files, fd, expected_bytes=layout.header_bytes)
            check_header(header, set_fingerprint=self.set_fingerprint, geometry=self.geometry)
            check_same_record(header.identity, job.record)
            parts = self._parts(job, layout, memory)
            size = files.fstat(fd).st_size
            legal, needed = layout.legal_size(size), parts[-1][-1].offset + parts[-1][-1].num_bytes
            if legal is None or legal < needed:
                raise RecordError(Problem.TRUNCATED, f"{size} bytes where the job needs {needed}")
            if not self.direct:
                start = parts[0][0].offset
                files.will_need(fd, start, needed - start)
        except BaseException:
            files.close(fd)
            raise
        return DiskFetch(shelf=self, fd=fd, header=header, parts=parts)

    def _stored_header(self, job: Job) -> RecordHeader:
        fd = self.directory.open_record(record_file_name(job.record.key), direct=False)
        try:
            header = read_header(self.directory.files, fd)
        finally:
            self.directory.files.close(fd)
        check_header(header, set_fingerprint=self.set_fingerprint, geometry=self.geometry)
        check_same_record(header.identity, job.record)
        return header

    def open_shard(self, job: Job) -> ShardReader:
        """Open this rank's file of a record, to be put into the pool."""
        fd = self.directory.open_record(record_file_name(job.record.key), direct=self.direct)
        try:
            header = read_header(self.directory.files, fd, expected_bytes=self.layout(job).header_bytes)
            check_header(header, set_fingerprint=self.set_fingerprint, geometry=self.geometry)
            check_same_record(header.identity, job.record)
            size = require_size(self.directory.files.fstat(fd).st_size, header.layout, job.extent)
        except BaseException:
            self.directory.files.close(fd)
            raise
        return _FileShard(self.directory.files, fd, size)

    def truncate(self, job: Job) -> int:
        """Cut the file behind the tail or behind the pages."""
        failpoint("truncate.begin")
        layout = self._stored_header(job).layout
        size = layout.tail_end if job.keep_tail else layout.pages_end
        return self.directory.truncate(record_file_name(job.record.key), size)

    def unlink(self, job: Job) -> int:
        """Remove the file, damaged or not, unless it is sound and another store's, or not this set's.

        A temporary that a failed store of this record could not remove goes too: this may be what undoes it.
        """
        failpoint("unlink.begin")
        self.directory.remove(temporary_name(job.record.key, job.record.store_id))
        try:
            self._stored_header(job)
        except RecordError as error:
            if error.problem in _NOT_OURS:
                raise
        failpoint("unlink.remove")
        return self.directory.remove(record_file_name(job.record.key))


_NOT_OURS = {Problem.NEWER_FORMAT, Problem.OTHER_SET, Problem.OTHER_RECORD}


@dataclass(frozen=True, slots=True)
class _FileShard:
    """A shard in a file; see :class:`flare_cache.pool.shard_source.ShardReader`."""

    files: DirectoryFiles
    fd: int
    num_bytes: int

    def read(self, offset: int, num_bytes: int, buffer: memoryview) -> memoryview:
        """Into the buffer."""
        view = buffer[:num_bytes]
        read_sections(self.files, self.fd, views=[view], offset=offset)
        return view

    def close(self) -> None:
        """Close the file."""
        self.files.close(self.fd)


@dataclass(slots=True)
class DiskStore:
    """A begun store; see :class:`flare_cache.transfer.Transfer`."""

    shelf: DiskShelf
    job: Job
    fd: int
    temporary: str
    layout: FileLayout
    parts: Sequence[Part]
    digests: bytearray
    _closed: bool = False
    _inode: int = field(default=-1)

    def run(self, part: Part) -> None:
        """Digest and write one part."""
        with self.shelf.passage.outgoing([item.segments for item in part]) as window:
            for item, views in zip(part, window.sections, strict=True):
                at = item.position * DIGEST_BYTES
                self.digests[at : at + DIGEST_BYTES] = section_digest(
                    self.job.record.store_id, self.shelf.geometry.rank, index=item.index, payload=views
                )
            failpoint("store.write")
            write_sections(self.shelf.directory.files, self.fd, views=flat_views(window), offset=part[0].offset)

    def finish(self) -> int:
        """Write the header, make the file durable if asked to, and give it its name."""
        shelf, record = self.shelf, self.job.record
        header = encode_header(
            record,
            self.job.token_ids,
            set_fingerprint=shelf.set_fingerprint,
            geometry=shelf.geometry,
            digests=bytes(self.digests),
        )
        buffer = aligned_buffer(len(header))
        buffer[:] = header
        failpoint("store.header")
        write_sections(shelf.directory.files, self.fd, views=[buffer], offset=0)
        failpoint("store.written")
        self._inode = shelf.directory.files.fstat(self.fd).st_ino
        if shelf.durability is Durability.POWER:
            self._sync(self._sync_file)
        self._close()
        shelf.directory.publish(self.temporary, record_file_name(record.key))
        if shelf.durability is Durability.POWER:
            self._sync(self._sync_directory)
        return self.layout.row_end

    def _sync(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except OSError as error:
            # The kernel has dropped what it could not write: a second fsync would succeed and lie.
            if self.shelf.directory.stores_stopped is None:
                self.shelf.directory.stores_stopped = f"fsync failed: {error.strerror}"
            raise

    def _sync_file(self) -> None:
        failpoint("store.fsync")
        self.shelf.directory.files.fsync(self.fd)

    def _sync_directory(self) -> None:
        failpoint("store.fsync-directory")
        self.shelf.directory.sync()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self.shelf.directory.files.close(self.fd)

    def abandon(self) -> bool:
        """Remove what was written, under either name."""
        directory = self.shelf.directory
        with contextlib.suppress(OSError):
            self._close()
        try:
            directory.remove(self.temporary)
            name = record_file_name(self.job.record.key)
            # The final name may be another store's file, which refused this one.
            with contextlib.suppress(FileNotFoundError):
                if directory.files.lstat(name).st_ino == self._inode:
                    directory.remove(name)
        except OSError:
            return False
        return True


@dataclass(slots=True)
class DiskFetch:
    """A begun fetch; see :class:`flare_cache.transfer.Transfer`."""

    shelf: DiskShelf
    fd: int
    header: RecordHeader
    parts: Sequence[Part]

    def run(self, part: Part) -> None:
        """Read, verify and deliver one part."""
        with self.shelf.passage.incoming([item.segments for item in part]) as window:
            read_sections(self.shelf.directory.files, self.fd, views=flat_views(window), offset=part[0].offset)
            failpoint("fetch.verify")
            verify_items(part, window, header=self.header, geometry=self.shelf.geometry)
            failpoint("fetch.deliver")
            window.deliver()

    def finish(self) -> int:
        """Close the file; bytes read."""
        self.shelf.directory.files.close(self.fd)
        return sum(item.num_bytes for part in self.parts for item in part)

    def abandon(self) -> bool:
        """Close the file."""
        self.shelf.directory.files.close(self.fd)
        return True
