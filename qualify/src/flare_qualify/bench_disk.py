"""How near a rank's records come to its disk: staged stores and fetches beside raw reads and writes of the same bytes.

``python -m flare_qualify.bench_disk`` reads the files of the same records raw (O_DIRECT where it works, else cold and
buffered) by as many threads with calls as large, and by fetch jobs with all digests checked; the page cache is dropped
before each side, the sides take turns, and the medians and their ratio are printed. Likewise for writing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from flare_cache.directory_files import DirectoryFiles, OsFiles
from flare_cache.disk_shelf import DEFAULT_PART_BYTES
from flare_cache.host_memory import aligned_buffer
from flare_cache.jobs import JobOp, RecordIdentity, record_file_name
from flare_cache.record_file import DiskTransport, open_flags, read_sections, write_sections
from flare_cache.staged import DEFAULT_NUM_THREADS
from flare_cli.bench_cache.page_cache import drop_page_cache
from flare_qualify.staged_rank import StagedRank, bench_geometry, bench_identity, opened_rank

__all__ = ["Comparison", "Extent", "compare", "raw_transfer"]


class Transfer(Protocol):
    """``read_sections`` or ``write_sections``."""

    def __call__(self, files: DirectoryFiles, fd: int, *, views: Sequence[memoryview], offset: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Extent:
    """Some bytes of a file and where they go to or come from."""

    path: Path
    offset: int
    memory: memoryview


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of one operation; speeds in GB/s, the ratio is the median of the rounds' ratios."""

    op: str
    direct: bool
    num_bytes: int
    rounds: int
    raw_gb_per_second: float
    staged_gb_per_second: float
    ratio: float


def raw_transfer(extents: Sequence[Extent], transfer: Transfer, *, flags: int, num_threads: int) -> float:
    """Move ``extents`` with ``num_threads`` threads that take the next one as they come free; seconds."""
    descriptors = {path: os.open(path, flags, 0o600) for path in {extent.path for extent in extents}}
    files = OsFiles(-1)  # only descriptors are used
    pending = iter(extents)
    mutex = threading.Lock()

    def work() -> None:
        while True:
            with mutex:
                extent = next(pending, None)
            if extent is None:
                return
            transfer(files, descriptors[extent.path], views=[extent.memory], offset=extent.offset)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for descriptor in descriptors.values():
        os.close(descriptor)
    return seconds


def _extents(paths: Sequence[Path], memory: memoryview, *, file_bytes: int, part_bytes: int) -> list[Extent]:
    return [
        Extent(path, at, memory[number * file_bytes + at : number * file_bytes + min(at + part_bytes, file_bytes)])
        for number, path in enumerate(paths)
        for at in range(0, file_bytes, part_bytes)
    ]


@dataclass(frozen=True, slots=True)
class _Bench:
    rank: StagedRank
    records: Sequence[RecordIdentity]
    file_bytes: int
    path: Path
    num_threads: int
    part_bytes: int
    raw_memory: memoryview

    def raw_read(self) -> float:
        paths = [self.path / record_file_name(record.key) for record in self.records]
        extents = _extents(paths, self.raw_memory, file_bytes=self.file_bytes, part_bytes=self.part_bytes)
        flags = os.O_RDONLY | open_flags(direct=self.rank.shelf.direct)
        return raw_transfer(extents, read_sections, flags=flags, num_threads=self.num_threads)

    def raw_write(self) -> float:
        paths = [self.path / f"raw-{number}" for number in range(len(self.records))]
        extents = _extents(paths, self.raw_memory, file_bytes=self.file_bytes, part_bytes=self.part_bytes)
        flags = os.O_WRONLY | os.O_CREAT | open_flags(direct=self.rank.shelf.direct)
        seconds = raw_transfer(extents, write_sections, flags=flags, num_threads=self.num_threads)
        for path in paths:
            path.unlink()
        return seconds

    def staged(self, op: JobOp) -> float:
        num_pages = sum(record.num_pages for record in self.records)
        start = time.perf_counter()
        self.rank.run(op, self.records, first_page=num_pages if op is JobOp.FETCH else 0)
        return time.perf_counter() - start

    def compare(self, op: JobOp, rounds: int) -> Comparison:
        num_bytes = self.file_bytes * len(self.records)
        raw: list[float] = []
        staged: list[float] = []
        for turn in range(rounds):
            sides = [False, True] if turn % 2 else [True, False]
            for is_raw in sides:
                drop_page_cache(self.path)
                if is_raw:
                    raw.append(self.raw_read() if op is JobOp.FETCH else self.raw_write())
                    continue
                staged.append(self.staged(op))
                if op is JobOp.STORE:
                    self.rank.run(JobOp.UNLINK, self.records)
        return Comparison(
            op=str(op),
            direct=self.rank.shelf.direct,
            num_bytes=num_bytes,
            rounds=rounds,
            raw_gb_per_second=num_bytes / statistics.median(raw) / 1e9,
            staged_gb_per_second=num_bytes / statistics.median(staged) / 1e9,
            ratio=statistics.median(r / s for r, s in zip(raw, staged, strict=True)),
        )


def compare(
    directory: Path,
    *,
    total_bytes: int,
    record_bytes: int = 256 << 20,
    page_bytes: int = 8 << 20,
    num_threads: int = DEFAULT_NUM_THREADS,
    part_bytes: int = DEFAULT_PART_BYTES,
    rounds: int = 5,
    transport: DiskTransport = DiskTransport.AUTO,
) -> list[Comparison]:
    """Store and fetch ``total_bytes`` in records of ``record_bytes``, beside raw writes and reads.

    Makes and removes a directory inside ``directory``; takes three times ``total_bytes`` of memory.
    """
    num_records = max(1, total_bytes // record_bytes)
    pages_per_record = max(1, record_bytes // page_bytes)
    records = [bench_identity(number, pages_per_record) for number in range(num_records)]
    num_pages = num_records * pages_per_record
    path = Path(tempfile.mkdtemp(prefix="flare-bench-", dir=directory))
    geometry = bench_geometry(page_bytes)
    try:
        with opened_rank(
            path,
            geometry,
            num_pages=2 * num_pages,
            num_threads=num_threads,
            part_bytes=part_bytes,
            transport=transport,
        ) as rank:
            rank.fill(num_pages)
            file_bytes = rank.run(JobOp.STORE, records) // num_records
            raw_memory = aligned_buffer(num_records * file_bytes)
            raw_memory[:] = bytes(len(raw_memory))  # the first touch of a page costs more than reading into it
            rank.run(JobOp.FETCH, records, first_page=num_pages)
            bench = _Bench(rank, records, file_bytes, path, num_threads, part_bytes, raw_memory)
            fetch = bench.compare(JobOp.FETCH, rounds)
            for page in range(num_pages):
                if rank.pages.page(page) != rank.pages.page(num_pages + page):
                    raise SystemExit(f"page {page} came back different")
            raw_memory[:] = rank.pages.buffer[: len(raw_memory)]
            rank.run(JobOp.UNLINK, records)
            return [fetch, bench.compare(JobOp.STORE, rounds)]
    finally:
        shutil.rmtree(path)


def main() -> None:
    """Print one line for each operation, or JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    arguments.add_argument("--total-mib", type=int, default=1024)
    arguments.add_argument("--record-mib", type=int, default=256)
    arguments.add_argument("--page-kib", type=int, default=8192)
    arguments.add_argument("--threads", type=int, default=DEFAULT_NUM_THREADS)
    arguments.add_argument("--part-mib", type=int, default=DEFAULT_PART_BYTES >> 20)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--transport", type=DiskTransport, default=DiskTransport.AUTO, choices=list(DiskTransport))
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    found = compare(
        options.directory,
        total_bytes=options.total_mib << 20,
        record_bytes=options.record_mib << 20,
        page_bytes=options.page_kib << 10,
        num_threads=options.threads,
        part_bytes=options.part_mib << 20,
        rounds=options.rounds,
        transport=options.transport,
    )
    for one in found:
        if options.json:
            print(json.dumps(asdict(one)))
        else:
            print(
                f"{one.op:6} {'direct' if one.direct else 'buffered':9} raw {one.raw_gb_per_second:5.2f} GB/s   "
                f"staged {one.staged_gb_per_second:5.2f} GB/s   ratio {one.ratio:4.2f}"
            )


if __name__ == "__main__":
    main()
