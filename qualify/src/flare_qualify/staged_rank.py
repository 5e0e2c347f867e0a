"""One rank's disk records without an engine: pages of random bytes, a record directory and its staged transport."""

from __future__ import annotations

import hashlib
import os
import queue
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flare_cache.directory import RecordDirectory
from flare_cache.disk_shelf import DEFAULT_PART_BYTES, DiskShelf, use_direct
from flare_cache.host_memory import DirectPassage
from flare_cache.host_pages import HostPages
from flare_cache.jobs import Job, JobOp, JobResult, JobStatus, RecordIdentity, Section
from flare_cache.record_file import DiskTransport
from flare_cache.staged import DEFAULT_NUM_THREADS, StagedTransport
from flare_core.geometry import Axis, Geometry, Plane
from flare_core.prefix import Tier

__all__ = ["JobFailed", "StagedRank", "bench_geometry", "bench_identity", "opened_rank"]

PAGE_TOKENS = 64
SET_FINGERPRINT = hashlib.sha256(b"staged rank").digest()
JOB_TIMEOUT_SECONDS = 120.0


class JobFailed(Exception):
    """A job of a benchmark ended other than OK."""


def bench_geometry(page_bytes: int, *, rank: int = 0, world_size: int = 1) -> Geometry:
    """Pages of 64 tokens with that many bytes (a multiple of 4096) and no rows."""
    axes = (Axis("token", PAGE_TOKENS), Axis("dim", page_bytes // PAGE_TOKENS // 4))
    return Geometry(rank, world_size, PAGE_TOKENS, (Plane("kv", "float32", axes),))


def bench_identity(number: int, num_pages: int) -> RecordIdentity:
    """A record of whole pages at a root of its own; the same for the same number."""
    key = hashlib.sha256(struct.pack("<I", number)).digest()
    return RecordIdentity(
        key=key,
        store_id=key[:16],
        parent_key=b"",
        start_key=hashlib.sha256(key).digest(),
        start=0,
        end=num_pages * PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        tail_tokens=0,
        has_row=False,
    )


@dataclass(slots=True)
class StagedRank:
    """A started transport over host pages; jobs are submitted together and waited for together."""

    directory: RecordDirectory
    pages: HostPages
    shelf: DiskShelf
    transport: StagedTransport
    results: queue.SimpleQueue[JobResult] = field(default_factory=queue.SimpleQueue)
    next_job_id: int = 1

    def fill(self, num_pages: int) -> None:
        """Random bytes into the first pages."""
        for page in range(num_pages):
            self.pages.page(page)[:] = os.urandom(self.pages.geometry.page_bytes)

    def run(self, op: JobOp, records: Sequence[RecordIdentity], *, first_page: int = 0) -> int:
        """Run ``op`` on all records at once, their pages one behind the other; bytes moved.

        Raises:
            JobFailed: one of them did not end OK.
        """
        page = first_page
        for record in records:
            moves = op in (JobOp.STORE, JobOp.FETCH)
            sections = tuple(Section(i, page + i) for i in range(record.num_sections)) if moves else ()
            page += len(sections)
            token_ids = bytes(4 * (record.end - record.start)) if op is JobOp.STORE else b""
            job = Job(
                job_id=self.next_job_id, op=op, tier=Tier.DISK, record=record, sections=sections, token_ids=token_ids
            )
            self.next_job_id += 1
            self.transport.submit(job)
        num_bytes = 0
        for _ in records:
            result = self.results.get(timeout=JOB_TIMEOUT_SECONDS)
            if result.status is not JobStatus.OK:
                raise JobFailed(f"{op}: {result.status}: {result.reason}")
            num_bytes += result.num_bytes
        return num_bytes


@contextmanager
def opened_rank(
    path: Path,
    geometry: Geometry,
    *,
    num_pages: int,
    num_threads: int = DEFAULT_NUM_THREADS,
    part_bytes: int = DEFAULT_PART_BYTES,
    transport: DiskTransport = DiskTransport.AUTO,
) -> Iterator[StagedRank]:
    """A rank over ``path`` (created, 0700) with ``num_pages`` host pages. The process ends if it does not drain."""
    directory = RecordDirectory.open(path)
    direct = use_direct(directory, transport)
    pages = HostPages.allocate(geometry, num_pages=num_pages)
    shelf = DiskShelf(
        directory=directory,
        geometry=geometry,
        set_fingerprint=SET_FINGERPRINT,
        passage=DirectPassage(aligned=direct),
        direct=direct,
        part_bytes=part_bytes,
    )
    results: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
    staged = StagedTransport(
        geometry=geometry,
        num_pages=num_pages,
        num_slots=0,
        memory=pages,
        shelves={Tier.DISK: shelf},
        on_result=results.put,
        on_fault=print,
        num_threads=num_threads,
    )
    staged.start()
    try:
        yield StagedRank(directory, pages, shelf, staged, results)
    finally:
        if not staged.close(JOB_TIMEOUT_SECONDS):
            os._exit(70)
        directory.close()
