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
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from flare_cache.index import Record, RecordIndex
from flare_cache.jobs import RecordIdentity
from flare_cache.lookup import TierIndex, find_restorable
from flare_cache.record_group import LeaderGroup
from flare_core.keys import chain_keys, root_key, token_array
from flare_core.prefix import PrefixQuery, Restorable, StoreRequest, Tier
from flare_qualify.bench_join import measure_join
from flare_qualify.rank_processes import PAGE_TOKENS, open_processes

_RECORD_PAGES = 32


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["lookup", "join", "jobs"])
    parser.add_argument("--num-records", type=int, default=100_000)
    parser.add_argument("--num-jobs", type=int, default=400)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--num-rounds", type=int, default=3, help="joins of each kind")
    options = parser.parse_args()
    if options.only in (None, "lookup"):
        _print(lookup=_measure_lookup(options.num_records))
    if options.only in (None, "join"):
        _print(join=measure_join(options.num_records, options.directory, world_size=3, num_rounds=options.num_rounds))
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


# Jobs.


def _measure_jobs(num_jobs: int, directory: Path, *, world_size: int) -> dict[str, float]:
    results: dict[str, float] = {"world_size": world_size, "num_jobs": num_jobs}
    with tempfile.TemporaryDirectory(prefix="flare-jobs-", dir=directory) as path:
        for tier, root in (("memory", None), ("disk", Path(path))):
            with open_processes(world_size, root) as group, group.joined() as (leader, _):
                stores, fetches = _round_trips(leader, num_jobs)
            results[f"{tier}_store_ms"] = 1000 * statistics.median(stores)
            results[f"{tier}_fetch_ms"] = 1000 * statistics.median(fetches)
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
