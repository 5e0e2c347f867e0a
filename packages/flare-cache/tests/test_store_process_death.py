"""Death of the process at any instant: every reported record is whole afterwards, and nothing half-written stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flare_cache.directory import RecordDirectory
from flare_cache.inspect import list_records, verify_records

STORE_FOR_EVER = """
import hashlib, itertools, os, queue, sys
from pathlib import Path
from flare_cache.directory import RecordDirectory
from flare_cache.disk_shelf import DiskShelf
from flare_cache.host_memory import DirectPassage
from flare_cache.host_pages import HostPages
from flare_cache.jobs import Job, JobOp, JobStatus, RecordIdentity, Section
from flare_cache.staged import StagedTransport
from flare_core.geometry import Axis, Geometry, Plane
from flare_core.prefix import Tier

geometry = Geometry(0, 1, 4, (Plane("kv", "float32", (Axis("token", 4), Axis("dim", 4096))),))
pages = HostPages.allocate(geometry, num_pages=8)
pages.buffer[:] = os.urandom(len(pages.buffer))
shelf = DiskShelf(
    directory=RecordDirectory.open(Path(sys.argv[1])), geometry=geometry, set_fingerprint=bytes(32),
    passage=DirectPassage(aligned=False), direct=False, part_bytes=65536,
)
results = queue.SimpleQueue()
transport = StagedTransport(
    geometry=geometry, num_pages=8, num_slots=0, memory=pages, shelves={Tier.DISK: shelf}, on_result=results.put,
    on_fault=print,
)
transport.start()
for number in itertools.count(1):
    key = hashlib.sha256(f"{sys.argv[2]}-{number}".encode()).digest()
    record = RecordIdentity(
        key=key, store_id=key[:16], parent_key=b"", start_key=key, start=0, end=32, page_tokens=4, tail_tokens=0,
        has_row=False,
    )
    sections = tuple(Section(i, i) for i in range(8))
    transport.submit(
        Job(job_id=number, op=JobOp.STORE, tier=Tier.DISK, record=record, sections=sections, token_ids=bytes(128))
    )
    assert results.get().status is JobStatus.OK
    print(key.hex(), flush=True)
"""


@pytest.mark.parametrize("num_reported", [1, 7, 41])
def test_a_killed_process_loses_no_reported_record_and_leaves_no_broken_one(tmp_path, num_reported) -> None:
    path = tmp_path / "records"
    reported: set[str] = set()
    for life in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", STORE_FOR_EVER, str(path), str(life)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(num_reported):
            reported.add(process.stdout.readline().strip())
        process.kill()
        reported |= set(process.stdout.read().split())
        process.stdout.close()
        process.wait()
    RecordDirectory.open(path).close()
    listing = list_records(path)
    assert not listing.unusable
    assert {verdict.reason for verdict in verify_records(listing, progress=lambda *_: None)} == {None}
    assert reported <= {record.name[:64] for record in listing.records}
    assert {entry.suffix for entry in path.iterdir()} == {".rec", ""}
