"""One rank with a real record directory, real threads and host pages."""

from __future__ import annotations

import hashlib
import os
import queue
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from flare_cache.directory import RecordDirectory
from flare_cache.disk_shelf import DiskShelf, Durability, use_direct
from flare_cache.host_memory import DirectPassage
from flare_cache.host_pages import HostPages
from flare_cache.jobs import Job, JobOp, JobResult, RecordIdentity, Section, record_file_name
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.record_file import DiskTransport
from flare_cache.scan import scan_directory
from flare_cache.staged import StagedTransport
from flare_core.geometry import Axis, Geometry, Plane
from flare_core.prefix import Tier

NUM_PAGES, NUM_SLOTS, PAGE_TOKENS = 24, 3, 4
SET = hashlib.sha256(b"the set of the tests").digest()


def make_geometry(rank: int = 0, world_size: int = 2, *, row_bytes: int = 5000, dim: int = 256) -> Geometry:
    axes = (Axis("token", PAGE_TOKENS), Axis("dim", dim))
    return Geometry(rank, world_size, PAGE_TOKENS, (Plane("kv", "float32", axes),), row_bytes)


def make_identity(name: str = "a", *, num_pages: int = 3, tail_tokens: int = 2, has_row: bool = True, **fields):
    digest = hashlib.sha256(name.encode()).digest()
    start = fields.pop("start", 8)
    identity = RecordIdentity(
        key=digest,
        store_id=digest[16:],
        parent_key=hashlib.sha256(digest).digest(),
        start_key=hashlib.sha256(digest + b"start").digest(),
        start=start,
        end=start + num_pages * PAGE_TOKENS + tail_tokens,
        page_tokens=PAGE_TOKENS,
        tail_tokens=tail_tokens,
        has_row=has_row,
    )
    return msgspec.structs.replace(identity, **fields)


def make_token_ids(identity: RecordIdentity) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in range(identity.start, identity.end))


@dataclass
class Rank:
    directory: RecordDirectory
    geometry: Geometry
    pages: HostPages
    transport: StagedTransport
    disk: DiskShelf
    memory: MemoryShelf
    results: queue.Queue
    next_job_id: int = 1
    done: dict[int, JobResult] = field(default_factory=dict)

    def submit(self, op: JobOp, record: RecordIdentity, **fields) -> int:
        tier = fields.pop("tier", Tier.DISK)
        job_id = self.next_job_id
        self.next_job_id += 1
        self.transport.submit(Job(job_id=job_id, op=op, tier=tier, record=record, **fields))
        return job_id

    def result(self, job_id: int) -> JobResult:
        while job_id not in self.done:
            result = self.results.get(timeout=20)
            self.done[result.job_id] = result
        return self.done[job_id]

    def store(self, record: RecordIdentity, *, first_page: int = 0, **fields) -> JobResult:
        return self.result(self.submit_store(record, first_page=first_page, **fields))

    def submit_store(self, record: RecordIdentity, *, first_page: int = 0, **fields) -> int:
        return self.submit(
            JobOp.STORE,
            record,
            sections=tuple(Section(i, first_page + i) for i in range(record.num_sections)),
            row_slot=0 if record.has_row else None,
            token_ids=make_token_ids(record),
            **fields,
        )

    def fetch(self, record: RecordIdentity, *, first_page: int = 12, row_slot: int | None = 1, **fields) -> JobResult:
        sections = tuple(Section(i, first_page + i) for i in range(record.num_sections))
        slot = row_slot if record.has_row else None
        return self.result(self.submit(JobOp.FETCH, record, **{"sections": sections, "row_slot": slot, **fields}))

    def truncate(self, record: RecordIdentity, *, keep_tail: bool = False, **fields) -> JobResult:
        return self.result(self.submit(JobOp.TRUNCATE, record, keep_tail=keep_tail, **fields))

    def unlink(self, record: RecordIdentity, **fields) -> JobResult:
        return self.result(self.submit(JobOp.UNLINK, record, **fields))

    def fill(self, seed: int = 1) -> None:
        """Other bytes in every page and slot."""
        for page in range(NUM_PAGES):
            view = self.pages.page(page)
            view[:] = hashlib.shake_128(bytes([seed, page])).digest(len(view))
        for slot in range(NUM_SLOTS):
            if self.geometry.row_bytes:
                view = self.pages.row(slot)
                view[:] = hashlib.shake_128(bytes([seed, 200 + slot])).digest(len(view))

    def page_bytes(self, first: int, count: int) -> list[bytes]:
        return [bytes(self.pages.page(first + i)) for i in range(count)]

    def path(self, record: RecordIdentity) -> Path:
        return self.directory.path / record_file_name(record.key)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.path.iterdir() if path.name != "LOCK")

    def scan(self, *, with_token_ids: bool = True):
        return scan_directory(
            self.directory, geometry=self.geometry, set_fingerprint=SET, with_token_ids=with_token_ids
        )


@pytest.fixture
def open_rank(tmp_path):
    """``open_rank(rank=0, world_size=2, ...)``: a started :class:`Rank`; drained and closed after the test."""
    opened: list[Rank] = []

    def open_one(
        rank: int = 0,
        world_size: int = 2,
        *,
        path: Path | None = None,
        geometry: Geometry | None = None,
        transport: DiskTransport = DiskTransport.AUTO,
        durability: Durability = Durability.PROCESS,
        part_bytes: int = 8192,
        memory_limit: int = 1 << 20,
        num_threads: int = 3,
        pages=None,
        passage=None,
    ) -> Rank:
        geometry = geometry or make_geometry(rank, world_size)
        directory = RecordDirectory.open(path or tmp_path / f"rank-{rank}")
        direct = use_direct(directory, transport)
        passage = passage or DirectPassage(aligned=direct)
        disk = DiskShelf(
            directory=directory,
            geometry=geometry,
            set_fingerprint=SET,
            passage=passage,
            direct=direct,
            durability=durability,
            part_bytes=part_bytes,
        )
        memory = MemoryShelf(geometry=geometry, set_fingerprint=SET, passage=passage, limit_bytes=memory_limit)
        pages = pages or HostPages.allocate(geometry, num_pages=NUM_PAGES, num_slots=NUM_SLOTS)
        results: queue.Queue = queue.Queue()
        staged = StagedTransport(
            geometry=geometry,
            num_pages=NUM_PAGES,
            num_slots=NUM_SLOTS,
            memory=pages,
            shelves={Tier.DISK: disk, Tier.MEMORY: memory},
            on_result=results.put,
            on_fault=results.put,
            num_threads=num_threads,
        )
        staged.start()
        made = Rank(directory, geometry, pages, staged, disk, memory, results)
        if isinstance(pages, HostPages):
            made.fill()
        opened.append(made)
        return made

    yield open_one
    for rank in opened:
        assert rank.transport.close(20)
        rank.directory.close()


@pytest.fixture
def new_identity():
    """``new_identity(name, num_pages=..., tail_tokens=..., has_row=..., **fields)``: a record's identity."""
    return make_identity


@pytest.fixture
def new_geometry():
    """``new_geometry(rank, world_size, row_bytes=..., dim=...)``: small pages of four tokens."""
    return make_geometry


@pytest.fixture
def set_fingerprint() -> bytes:
    """The set that :func:`open_rank`'s records belong to."""
    return SET


@pytest.fixture
def mounted(tmp_path):
    """``mounted(options)``: a small tmpfs, unmounted after the test; skips where mounting is not allowed."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"mount-{len(made)}"
        path.mkdir()
        if (
            os.geteuid()
            or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=False).returncode
        ):
            pytest.skip("mounting is not allowed here")
        made.append(path)
        return path

    yield mount
    for path in made:
        subprocess.run(["umount", "-l", path], check=True)
