"""One rank of the benchmark: its pages with known content, its record directory, and the raw read of its records.

The same on rank zero and on a peer. Knows no link and no other rank.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flare_cache.directory import RecordDirectory
from flare_cache.directory_files import DirectoryFiles
from flare_cache.disk_shelf import DEFAULT_PART_BYTES, DiskShelf, use_direct
from flare_cache.host_memory import DirectPassage, view_at
from flare_cache.host_pages import HostPages
from flare_cache.jobs import Job, JobOp, JobResult, RecordIdentity, Section, record_file_name
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.record import RecordError, file_layout
from flare_cache.record_file import DiskTransport, read_sections
from flare_cache.record_group import RankSetup
from flare_cache.scan import scan_directory
from flare_cache.staged import StagedTransport
from flare_cache.transfer import Shelf, job_items, split_parts
from flare_cli.bench_cache.settings import GroupSettings, cache_settings, set_identity
from flare_core.prefix import Tier

__all__ = ["BenchRank", "open_rank"]

_WIPED = 0xA5
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Read:
    """One vectored read of a record's file."""

    name: str
    views: list[memoryview]
    offset: int


@dataclass(slots=True)
class BenchRank:
    """See the module. Calls block; one at a time.

    Attributes:
        rank: which.
        directory: its records; open and locked.
        pages: its page memory.
        direct: records are read and written with O_DIRECT.
    """

    settings: GroupSettings
    rank: int
    directory: RecordDirectory
    pages: HostPages
    direct: bool
    _reads: list[_Read] = field(default_factory=list)

    def setup(self) -> RankSetup:
        """What the record path needs of this rank."""
        return RankSetup(
            settings=cache_settings(self.settings),
            rank=self.rank,
            directory=self.directory,
            make_transport=self._make_transport,
        )

    def fill(self) -> None:
        """Give every page its content."""
        for page in range(self.settings.num_pages):
            self._words(page)[:] = self._content(page)

    def wipe(self) -> None:
        """Overwrite every page."""
        np.frombuffer(self.pages.buffer, dtype=np.uint8).fill(_WIPED)

    def verify(self) -> str:
        """Compare every page with its content; the first that differs in words, or the empty string."""
        for page in range(self.settings.num_pages):
            if not np.array_equal(self._words(page), self._content(page)):
                return f"page {page} of rank {self.rank} does not hold the bytes that were stored"
        return ""

    def scan(self) -> None:
        """Find out what :meth:`raw_read` is to read: what the transport reads, but for the headers."""
        found = scan_directory(
            self.directory,
            geometry=self.pages.geometry,
            set_fingerprint=set_identity(self.settings).fingerprint(),
            with_token_ids=False,
        )
        records = sorted((record.identity for record in found.records), key=lambda record: record.start)
        self._reads = [read for record in records for read in self._record_reads(record)]

    def raw_read(self) -> None:
        """Read every section from its file into its page, and nothing else.

        As many threads, and the same calls, offsets, lengths and flags as the transport's; no digests, no jobs.

        Raises:
            RecordError: a file cannot be read.
        """
        names = {read.name for read in self._reads}
        with contextlib.ExitStack() as stack:
            descriptors: dict[str, int] = {}
            for name in names:
                descriptors[name] = self.directory.open_record(name, direct=self.direct)
                stack.callback(os.close, descriptors[name])
            reads = [(descriptors[read.name], read) for read in self._reads]
            _read_all(self.directory.files, reads, num_threads=self.settings.num_threads)

    def close(self) -> None:
        """Give the directory back; nothing reads or writes any more."""
        self.directory.close()

    def _record_reads(self, record: RecordIdentity) -> list[_Read]:
        geometry = self.pages.geometry
        layout = file_layout(record, page_bytes=geometry.page_bytes, row_stride=geometry.row_stride)
        first_page = record.start // record.page_tokens
        sections = tuple(Section(index, first_page + index) for index in range(record.num_sections))
        job = Job(job_id=0, op=JobOp.FETCH, tier=Tier.DISK, record=record, sections=sections)
        parts = split_parts(job_items(job, layout, self.pages), DEFAULT_PART_BYTES)
        name = record_file_name(record.key)
        return [
            _Read(name, [view_at(*segment) for item in part for segment in item.segments], part[0].offset)
            for part in parts
        ]

    def _make_transport(
        self, on_result: Callable[[JobResult], None], on_fault: Callable[[str], None]
    ) -> StagedTransport:
        return StagedTransport(
            geometry=self.pages.geometry,
            num_pages=self.settings.num_pages,
            num_slots=0,
            memory=self.pages,
            shelves=self._shelves(),
            on_result=on_result,
            on_fault=on_fault,
            num_threads=self.settings.num_threads,
        )

    def _shelves(self) -> Mapping[Tier, Shelf]:
        geometry = self.pages.geometry
        passage = DirectPassage(aligned=self.direct)
        fingerprint = set_identity(self.settings).fingerprint()
        shelves: dict[Tier, Shelf] = {
            Tier.DISK: DiskShelf(
                directory=self.directory,
                geometry=geometry,
                set_fingerprint=fingerprint,
                passage=passage,
                direct=self.direct,
            )
        }
        if self.settings.memory_bytes:
            shelves[Tier.MEMORY] = MemoryShelf(
                geometry=geometry,
                set_fingerprint=fingerprint,
                passage=passage,
                limit_bytes=self.settings.memory_bytes,
            )
        return shelves

    def _words(self, page: int) -> NDArray[np.uint64]:
        return np.frombuffer(self.pages.page(page), dtype=np.uint64)

    def _content(self, page: int) -> NDArray[np.uint64]:
        generator = np.random.SFC64((self.settings.seed, self.rank, page))
        words: NDArray[np.uint64] = generator.random_raw(self.settings.page_bytes // _WORD_BYTES)
        return words


def _read_all(files: DirectoryFiles, reads: Sequence[tuple[int, _Read]], *, num_threads: int) -> None:
    pending = list(reversed(reads))
    faults: list[RecordError] = []

    def work() -> None:
        while pending and not faults:
            try:
                fd, read = pending.pop()
            except IndexError:
                return
            try:
                read_sections(files, fd, views=read.views, offset=read.offset)
            except RecordError as error:
                faults.append(error)

    threads = [threading.Thread(target=work, name=f"raw read {number}") for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def open_rank(settings: GroupSettings, rank: int) -> BenchRank:
    """Make the rank's directory and its memory.

    Raises:
        UsageError: the directory cannot be used.
        OSError: no memory, or the directory cannot be written.
    """
    geometry = set_identity(settings).geometries[rank]
    directory = RecordDirectory.open(Path(settings.directory) / f"rank{rank}")
    try:
        direct = use_direct(directory, DiskTransport.AUTO)
        pages = HostPages.allocate(geometry, num_pages=settings.num_pages)
    except BaseException:
        directory.close()
        raise
    return BenchRank(settings, rank, directory, pages, direct)
