"""What planning costs: lookup in a large index, the join of large directories, and the round trip of a small job.

``python -m flare_qualify.bench_cache_planning`` prints one line of JSON for each. Peers are processes of their own,
with real directories, threads and links; the job's bytes are few, so that what is left is planning, links and
acknowledgements.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from flare_cache.digest import section_digest
from flare_cache.index import Record, RecordIndex
from flare_cache.jobs import RecordIdentity, record_file_name
from flare_cache.lookup import TierIndex, find_restorable
from flare_cache.outcomes import ShardedLimits
from flare_cache.record import encode_header
from flare_cache.record_group import LeaderGroup, start_leader, start_peer
from flare_cache.testing import RUN_ID, GroupPlan, LocalRank, make_rank, token_geometries
from flare_core.geometry import Geometry
from flare_core.keys import chain_keys, root_key, token_array
from flare_core.prefix import PrefixQuery, Restorable, StoreRequest, Tier
from flare_qualify.many_records import PAGE_TOKENS, small_identities
from flare_transport.link import Link
from flare_transport.local_link import local_link

_DIM = 16
_RECORD_PAGES = 32


def main() -> None:
    """Run what was asked for; as a peer process, serve until rank zero ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["lookup", "join", "jobs"])
    parser.add_argument("--num-records", type=int, default=100_000)
    parser.add_argument("--num-jobs", type=int, default=400)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--peer", nargs=4, metavar=("RANK", "WORLD_SIZE", "FD", "ROOT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:
        rank, world_size, descriptor, root = options.peer
        _serve_peer(int(rank), int(world_size), int(descriptor), root)
        return
    if options.only in (None, "lookup"):
        _print(lookup=_measure_lookup(options.num_records))
    if options.only in (None, "join"):
        _print(join=_measure_join(options.num_records, options.directory, world_size=3))
    if options.only in (None, "jobs"):
        _print(jobs=_measure_jobs(options.num_jobs, options.directory, world_size=4))


def _print(**results: object) -> None:
    print(json.dumps(results), flush=True)


# Lookup.


def _measure_lookup(num_records: int, *, num_tokens: int = 1_000_000, repeats: int = 9) -> dict[str, float]:
    root = root_key(bytes(32), b"")
    prompt = token_array(range(num_tokens))
    keys = chain_keys(root, prompt, PAGE_TOKENS)
    before = _resident_bytes()
    index = RecordIndex(PAGE_TOKENS)
    _add_chain(index, root, prompt.tobytes(), keys, _RECORD_PAGES)
    chain = 0
    while len(index) < num_records:
        chain += 1
        ids = token_array(range(chain, chain + PAGE_TOKENS * _RECORD_PAGES * 8))
        other = root_key(bytes(32), chain.to_bytes(4, "little"))
        _add_chain(index, other, ids.tobytes(), chain_keys(other, ids, PAGE_TOKENS), 8)
    grown = _resident_bytes() - before
    tiers = [TierIndex(Tier.DISK, index)]
    with_keys, without_keys = [], []
    found = Restorable((), 0)
    for _ in range(repeats):
        start = time.perf_counter()
        keys = chain_keys(root, prompt, PAGE_TOKENS)
        middle = time.perf_counter()
        found = find_restorable(PrefixQuery(root, prompt, keys), tiers, page_tokens=PAGE_TOKENS, has_rows=False)
        end = time.perf_counter()
        with_keys.append(end - start)
        without_keys.append(end - middle)
    if found.num_tokens != num_tokens:
        raise RuntimeError(f"{found.num_tokens} of {num_tokens} tokens were found")
    return {
        "num_records": len(index),
        "num_tokens": num_tokens,
        "lookup_ms": 1000 * statistics.median(without_keys),
        "lookup_with_keys_ms": 1000 * statistics.median(with_keys),
        "bytes_per_record": grown / len(index),
    }


def _add_chain(index: RecordIndex, root: bytes, token_ids: bytes, keys: Sequence[bytes], pages: int) -> None:
    parent: Record | None = None
    for first in range(0, len(keys), pages):
        last = min(first + pages, len(keys))
        identity = RecordIdentity(
            key=keys[last - 1],
            store_id=os.urandom(16),
            parent_key=parent.key if parent is not None else b"",
            start_key=keys[first - 1] if first else root,
            start=first * PAGE_TOKENS,
            end=last * PAGE_TOKENS,
            page_tokens=PAGE_TOKENS,
            tail_tokens=0,
            has_row=False,
        )
        step = 4 * PAGE_TOKENS
        parent = Record(identity, token_ids[first * step : last * step], 1 << 20, 0, has_row=False, parent=parent)
        index.add(parent)
        index.mark_stored(parent)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# Groups of processes.


def _plan(world_size: int, root: Path | None, *, memory_bytes: int | None = None) -> GroupPlan:
    geometries = token_geometries(world_size, page_tokens=PAGE_TOKENS, dims=[_DIM] * world_size)
    return GroupPlan(geometries=geometries, root=root, num_pages=64, memory_bytes=memory_bytes)


class _Group:
    """Rank zero here, every peer in a process."""

    def __init__(self, plan: GroupPlan, stack: ExitStack) -> None:
        self.plan = plan
        self.rank: LocalRank = make_rank(plan, 0)
        self.links: dict[int, Link] = {}
        world_size = len(plan.geometries)
        peers: list[subprocess.Popen[bytes]] = []
        for rank in range(1, world_size):
            here, there = socket.socketpair()
            self.links[rank] = local_link(here, name=f"record link to rank {rank}")
            place = [str(rank), str(world_size), str(there.fileno()), str(plan.root or "")]
            command = [sys.executable, "-m", "flare_qualify.bench_cache_planning", "--peer", *place]
            process = subprocess.Popen(command, pass_fds=[there.fileno()], stdout=subprocess.PIPE)
            there.close()
            peers.append(stack.enter_context(process))
        for process in peers:
            # Rank zero begins when all have imported and opened what they need; links are silent until then.
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError("a peer ended before it began")

    def start(self) -> LeaderGroup:
        return start_leader(
            self.rank.setup,
            self.links,
            run_id=RUN_ID,
            on_outcome=lambda: None,
            on_poison=lambda reason: print(f"poisoned: {reason}", file=sys.stderr, flush=True),
            limits=ShardedLimits(),
        )


def _serve_peer(rank: int, world_size: int, descriptor: int, root: str) -> None:
    plan = _plan(world_size, Path(root) if root else None, memory_bytes=None if root else 64 << 20)
    local = make_rank(plan, rank)
    link = local_link(socket.socket(fileno=descriptor), name="record link to rank 0")
    print("ready", flush=True)
    peer = start_peer(local.setup, link, run_id=RUN_ID, on_end=lambda _: None)
    peer.service.wait_ended()


# Join.


def _measure_join(num_records: int, directory: Path, *, world_size: int) -> dict[str, float]:
    root = Path(tempfile.mkdtemp(prefix="flare-join-", dir=directory))
    plan = _plan(world_size, root)
    fingerprint = plan.cache_settings(0).identity.fingerprint()
    try:
        for geometry in plan.geometries:
            _write_records(root / f"rank{geometry.rank}", num_records, geometry=geometry, fingerprint=fingerprint)
        seconds: list[float] = []
        reads: list[float] = []
        leader_cpu: list[float] = []
        kept = 0
        for _ in range(3):
            with ExitStack() as stack:
                group = _Group(plan, stack)
                reads.append(_read_files(root / "rank0"))
                start, cpu_start = time.perf_counter(), time.process_time()
                leader = group.start()
                seconds.append(time.perf_counter() - start)
                leader_cpu.append(time.process_time() - cpu_start)
                kept = leader.report.num_kept
                leader.dispatcher.close(10)
                if group.rank.directory is not None:
                    group.rank.directory.close()
        if kept != num_records:
            raise RuntimeError(f"{kept} of {num_records} records were kept")
    finally:
        shutil.rmtree(root)
    return {
        "num_records": num_records,
        "world_size": world_size,
        "join_seconds": statistics.median(seconds),
        "join_cpu_seconds_of_rank_zero": statistics.median(leader_cpu),
        "reads_of_one_rank_seconds": statistics.median(reads),
        "join_over_reads": statistics.median(one / other for one, other in zip(seconds, reads, strict=True)),
    }


def _read_files(path: Path) -> float:
    """Merely open every file of one rank and read its first block; seconds."""
    start = time.perf_counter()
    with os.scandir(path) as entries:
        for entry in entries:
            descriptor = os.open(entry.path, os.O_RDONLY)
            os.pread(descriptor, 4096, 0)
            os.close(descriptor)
    return time.perf_counter() - start


def _write_records(path: Path, num_records: int, *, geometry: Geometry, fingerprint: bytes) -> None:
    path.mkdir(mode=0o700)
    page = bytes(geometry.page_bytes)
    for identity, token_ids in small_identities(num_records):
        digest = section_digest(identity.store_id, geometry.rank, index=0, payload=[memoryview(page)])
        header = encode_header(identity, token_ids, set_fingerprint=fingerprint, geometry=geometry, digests=digest)
        (path / record_file_name(identity.key)).write_bytes(header + page)


# Jobs.


def _measure_jobs(num_jobs: int, directory: Path, *, world_size: int) -> dict[str, float]:
    results: dict[str, float] = {"world_size": world_size, "num_jobs": num_jobs}
    with ExitStack() as stack:
        plan = _plan(world_size, None, memory_bytes=64 << 20)
        leader = _Group(plan, stack).start()
        stores, fetches = _round_trips(leader, num_jobs)
        results["memory_store_ms"] = 1000 * statistics.median(stores)
        results["memory_fetch_ms"] = 1000 * statistics.median(fetches)
        leader.dispatcher.close(10)
    root = Path(tempfile.mkdtemp(prefix="flare-jobs-", dir=directory))
    try:
        with ExitStack() as stack:
            group = _Group(_plan(world_size, root), stack)
            leader = group.start()
            stores, fetches = _round_trips(leader, num_jobs)
            results["disk_store_ms"] = 1000 * statistics.median(stores)
            results["disk_fetch_ms"] = 1000 * statistics.median(fetches)
            leader.dispatcher.close(10)
    finally:
        shutil.rmtree(root)
    return results


def _round_trips(leader: LeaderGroup, num_jobs: int) -> tuple[list[float], list[float]]:
    """Seconds from asking the store to its event, one job at a time."""
    store = leader.store
    stores, fetches = [], []
    for number in range(num_jobs):
        root = root_key(bytes(32), hashlib.sha256(number.to_bytes(4, "little")).digest())
        ids = token_array(range(PAGE_TOKENS))
        keys = chain_keys(root, ids, PAGE_TOKENS)
        start = time.perf_counter()
        store.store(StoreRequest(root, ids, keys, [number % 32], None, None, after_step=0))
        while not store.poll():
            time.sleep(0)
        middle = time.perf_counter()
        query = PrefixQuery(root, ids, keys)
        store.fetch(query, store.lookup(query), pages=[32 + number % 32], row_slot=None, after_step=0)
        while not store.poll():
            time.sleep(0)
        end = time.perf_counter()
        stores.append(middle - start)
        fetches.append(end - middle)
    return stores, fetches


if __name__ == "__main__":
    main()
