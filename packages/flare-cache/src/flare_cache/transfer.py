"""The sections of a job: where each lies in the file and in memory, and how they are split over threads.

Shared by the shelves. Knows layouts and addresses; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flare_cache.digest import ROW_INDEX, section_digest
from flare_cache.host_memory import Segments, Window
from flare_cache.jobs import Job, RecordIdentity
from flare_cache.record import FileLayout, Problem, RecordError, RecordHeader
from flare_core.geometry import Geometry
from flare_core.ports import PageMemory

__all__ = [
    "Item",
    "Part",
    "PoolPort",
    "Shelf",
    "Transfer",
    "check_same_record",
    "flat_views",
    "job_items",
    "split_parts",
    "verify_item",
    "verify_items",
]


@dataclass(frozen=True, slots=True)
class Item:
    """One section of a transfer: a page, the tail or the row.

    Attributes:
        index: what its digest is bound to.
        position: its place among the header's digests.
        offset, num_bytes: where it lies in the file.
        segments: where it lies in the rank's memory.
    """

    index: int
    position: int
    offset: int
    num_bytes: int
    segments: Segments


Part = Sequence[Item]
"""Items that follow each other in the file: one vectored read or write."""


class Transfer(Protocol):
    """A begun store or fetch. ``run`` may be called from several threads at once; the others once, after all parts."""

    @property
    def parts(self) -> Sequence[Part]:
        """What is to be run, in any order."""
        ...

    def run(self, part: Part) -> None:
        """Move one part. Blocks. Raises RecordError (the record is bad) or OSError (this rank failed)."""
        ...

    def finish(self) -> int:
        """Every part was run: verify or publish the whole; bytes moved (store: size of the file). Raises as ``run``."""
        ...

    def abandon(self) -> bool:
        """Something raised: undo. False: some of what was written could not be removed."""
        ...


class Shelf(Protocol):
    """A place where one rank's records live. Thread-safe; calls block. Jobs on one record never overlap."""

    def store(self, job: Job, memory: PageMemory) -> Transfer:
        """Begin a store. Raises OSError or RecordError; then nothing is left behind."""
        ...

    def fetch(self, job: Job, memory: PageMemory) -> Transfer:
        """Begin a fetch. Raises RecordError where the record is missing or another one, OSError."""
        ...

    def truncate(self, job: Job) -> int:
        """Drop row, or row and tail; bytes given back. Raises RecordError or OSError."""
        ...

    def unlink(self, job: Job) -> int:
        """Remove the record; bytes given back, 0 if it was gone. Raises RecordError (not this store's) or OSError."""
        ...


class PoolPort(Protocol):
    """The pool as one rank reaches it. Thread-safe; calls block, and never longer than the leader's deadline allows.

    A pool that is off, or a job of another session, is a miss. Nothing here ends in a device fault because of the pool.
    """

    def fetch(self, job: Job, memory: PageMemory, *, since: float) -> Transfer:
        """Begin to read this rank's shard of a record. Raises RecordError (missing, or not that record) or OSError.

        ``since``: monotonic seconds; when the job could begin, from when its time counts.
        """
        ...

    def put(self, job: Job, *, since: float) -> Transfer:
        """Begin to send this rank's shard; done when the pool holds it durably. Raises as :meth:`fetch`."""
        ...


def job_items(job: Job, layout: FileLayout, memory: PageMemory) -> list[Item]:
    """The sections that ``job`` moves, in file order. The job has been checked against geometry and bounds."""
    size = layout.page_bytes
    items = [
        Item(
            section.index, section.index, layout.section_offset(section.index), size, memory.page_segments(section.page)
        )
        for section in job.sections
    ]
    if job.row_slot is not None:
        row_bytes = layout.row_end - layout.tail_end
        segments = memory.row_segments(job.row_slot)
        items.append(Item(ROW_INDEX, layout.num_digests - 1, layout.tail_end, row_bytes, segments))
    return items


def split_parts(items: Sequence[Item], part_bytes: int) -> list[Part]:
    """Runs of neighbouring items of at most ``part_bytes`` (an item larger than that is a part of its own)."""
    parts: list[Part] = []
    current: list[Item] = []
    start = end = 0
    for item in items:
        if current and (item.offset != end or end + item.num_bytes - start > part_bytes):
            parts.append(current)
            current = []
        if not current:
            start = item.offset
        current.append(item)
        end = item.offset + item.num_bytes
    if current:
        parts.append(current)
    return parts


def flat_views(window: Window) -> list[memoryview]:
    """All pieces of a window, in order."""
    return [view for section in window.sections for view in section]


def verify_items(part: Part, window: Window, *, header: RecordHeader, geometry: Geometry) -> None:
    """Compare the digests of what a window holds with the header's.

    Raises:
        RecordError: SECTION_DIGEST, naming the section.
    """
    for item, views in zip(part, window.sections, strict=True):
        verify_item(item, views, header=header, geometry=geometry)


def verify_item(item: Item, payload: Iterable[memoryview], *, header: RecordHeader, geometry: Geometry) -> None:
    """Compare the digest of one section, in pieces that may come one by one, with the header's. Raises as above."""
    found = section_digest(header.identity.store_id, geometry.rank, index=item.index, payload=payload)
    if found != header.digest_at(item.position):
        name = "the row" if item.index == ROW_INDEX else f"section {item.index}"
        raise RecordError(Problem.SECTION_DIGEST, f"{name} of {header.identity.key.hex()[:16]}")


def check_same_record(found: RecordIdentity, expected: RecordIdentity) -> None:
    """Is this the record that the job names?

    Raises:
        RecordError: OTHER_RECORD, naming the first field that differs.
    """
    if found != expected:
        name = next(f for f in found.__struct_fields__ if getattr(found, f) != getattr(expected, f))
        raise RecordError(Problem.OTHER_RECORD, f"{name} of {found.key.hex()[:16]} is not the job's")
