"""Does staging through page-locked memory carry pages unharmed, and how fast? To be run on a machine with a GPU.

``python -m flare_qualify.cuda_staging_check --directory /nvme/scratch`` stores and fetches records between device
memory and disk and between device memory and the memory tier, compares every byte, and prints GB/s.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flare_cache.cuda_staging import CudaStaging, open_cuda_staging
from flare_cache.directory import RecordDirectory
from flare_cache.disk_shelf import DiskShelf, use_direct
from flare_cache.jobs import Job, JobOp, JobResult, JobStatus, RecordIdentity, Section
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.record_file import DiskTransport
from flare_cache.staged import DEFAULT_NUM_THREADS, StagedTransport
from flare_core.geometry import Axis, Geometry, Plane
from flare_core.prefix import Tier

__all__ = ["self_test"]

NUM_PAGES = 32
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _DevicePages:
    """Pages in device memory; each in ``num_segments`` pieces that lie apart from each other, if more than one."""

    base: int
    geometry: Geometry
    num_pages: int
    num_segments: int

    @property
    def device(self) -> str:
        return "cuda:0"

    def page_segments(self, page: int) -> Sequence[tuple[int, int]]:
        piece = self.geometry.page_bytes // self.num_segments
        stride = piece * self.num_pages
        return [(self.base + number * stride + page * piece, piece) for number in range(self.num_segments)]

    def row_segments(self, slot: int) -> Sequence[tuple[int, int]]:
        raise ValueError(f"row slot {slot}: there are no rows")


def _fill(staging: CudaStaging, pages: _DevicePages, contents: Sequence[bytes]) -> None:
    for page, content in enumerate(contents):
        with staging.incoming([pages.page_segments(page)]) as window:
            window.sections[0][0][:] = content
            window.deliver()


def _read(staging: CudaStaging, pages: _DevicePages, page: int) -> bytes:
    with staging.outgoing([pages.page_segments(page)]) as window:
        return bytes(window.sections[0][0])


def _run(transport: StagedTransport, results: queue.Queue[JobResult], job: Job) -> float:
    start = time.perf_counter()
    transport.submit(job)
    result = results.get(timeout=120)
    if result.status is not JobStatus.OK:
        raise SystemExit(f"{job.op} on {job.tier}: {result.status}: {result.reason}")
    return result.num_bytes / (time.perf_counter() - start) / 1e9


def self_test(directory: Path, *, num_segments: int = 1, page_bytes: int = 8 << 20) -> dict[str, float]:
    """GB/s by operation; raises SystemExit where a byte came back different.

    ``num_segments`` 1 is flare's own pool; a larger one is an engine whose pages lie apart, layer by layer.
    """
    axes = (Axis("token", PAGE_TOKENS), Axis("dim", page_bytes // PAGE_TOKENS // 4))
    geometry = Geometry(0, 1, PAGE_TOKENS, (Plane("kv", "float32", axes),))
    staging = open_cuda_staging(0, num_buffers=DEFAULT_NUM_THREADS, buffer_bytes=page_bytes)
    runtime: Any = staging.runtime
    error, base = runtime.cudaMalloc(2 * NUM_PAGES * page_bytes)
    if int(error) != 0:
        raise SystemExit(f"cudaMalloc: {error}")
    pages = _DevicePages(int(base), geometry, 2 * NUM_PAGES, num_segments)
    contents = [os.urandom(page_bytes) for _ in range(NUM_PAGES)]
    _fill(staging, pages, contents)
    records = RecordDirectory.open(directory)
    direct = use_direct(records, DiskTransport.AUTO)
    fingerprint = hashlib.sha256(b"self test").digest()
    disk = DiskShelf(directory=records, geometry=geometry, set_fingerprint=fingerprint, passage=staging, direct=direct)
    memory = MemoryShelf(geometry=geometry, set_fingerprint=fingerprint, passage=staging, limit_bytes=1 << 40)
    results: queue.Queue[JobResult] = queue.Queue()
    transport = StagedTransport(
        geometry=geometry,
        num_pages=2 * NUM_PAGES,
        num_slots=0,
        memory=pages,
        shelves={Tier.DISK: disk, Tier.MEMORY: memory},
        on_result=results.put,
        on_fault=print,
    )
    transport.start()
    speeds = {"direct": float(direct)}
    try:
        for number, tier in enumerate((Tier.MEMORY, Tier.DISK)):
            speeds |= _round_trip(transport, results, tier=tier, first_job=10 * number + 1)
            for page, content in enumerate(contents):
                if _read(staging, pages, NUM_PAGES + page) != content:
                    raise SystemExit(f"page {page} came back different from {tier}")
            _fill(staging, pages, [bytes(page_bytes)] * (2 * NUM_PAGES))
            _fill(staging, pages, contents)
    finally:
        if not transport.close(30):
            os._exit(70)
        records.close()
        staging.close()
    return speeds


def _round_trip(
    transport: StagedTransport, results: queue.Queue[JobResult], *, tier: Tier, first_job: int
) -> dict[str, float]:
    key = hashlib.sha256(tier.encode()).digest()
    num_tokens = NUM_PAGES * PAGE_TOKENS
    record = RecordIdentity(
        key=key,
        store_id=key[:16],
        parent_key=b"",
        start_key=key,
        start=0,
        end=num_tokens,
        page_tokens=PAGE_TOKENS,
        tail_tokens=0,
        has_row=False,
    )
    store = Job(
        job_id=first_job,
        op=JobOp.STORE,
        tier=tier,
        record=record,
        sections=tuple(Section(page, page) for page in range(NUM_PAGES)),
        token_ids=bytes(4 * num_tokens),
    )
    speeds = {f"store {tier}": _run(transport, results, store)}
    for repeat in range(3):
        fetch = Job(
            job_id=first_job + 1 + repeat,
            op=JobOp.FETCH,
            tier=tier,
            record=record,
            sections=tuple(Section(page, NUM_PAGES + page) for page in range(NUM_PAGES)),
        )
        speeds[f"fetch {tier} {repeat}"] = _run(transport, results, fetch)
    return speeds


def main() -> None:
    """Run with pages in one piece and in 64."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options = arguments.parse_args()
    for num_segments in (1, 64):
        path = Path(tempfile.mkdtemp(prefix="flare-cuda-", dir=options.directory))
        try:
            print(f"{num_segments} segment(s) a page")
            for name, speed in self_test(path, num_segments=num_segments).items():
                print(f"  {name:20} {speed:6.2f}")
        finally:
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
