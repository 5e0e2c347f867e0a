"""How long a group takes to join over directories with very many records.

Three cases: page cache warm, every header opened; warm with ``join.idx``; cold with ``join.idx``. Each join is of new
processes, one a rank, that have met and opened their directories; the time runs from the offer of the record links to
the prefix store.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from flare_cache.join_index import JOIN_INDEX_NAME
from flare_cli.bench_cache.page_cache import drop_page_cache, page_cache_method
from flare_qualify.many_records import read_first_blocks, write_records
from flare_qualify.rank_processes import bench_plan, open_processes

__all__ = ["measure_join"]


def measure_join(num_records: int, directory: Path, *, world_size: int, num_rounds: int) -> dict[str, object]:
    """Medians in seconds, beside merely reading the first block of one rank's files; ``directory`` is left empty.

    Raises:
        RuntimeError: not every record was kept.
    """
    plan = bench_plan(world_size, None)
    fingerprint = plan.cache_settings(0).identity.fingerprint()
    with tempfile.TemporaryDirectory(prefix="flare-join-", dir=directory) as path:
        root = Path(path)
        for geometry in plan.geometries:
            write_records(root / f"rank{geometry.rank}", num_records, geometry=geometry, set_fingerprint=fingerprint)
        os.sync()  # what is written back during a join would count as the join's
        reads: list[float] = []
        cases: dict[str, list[float]] = {"warm": [], "warm_with_hint": [], "cold_with_hint": []}
        for case, seconds in cases.items():
            for _ in range(num_rounds):
                _prepare(root, case)
                if case == "warm":
                    reads.append(_read_seconds(root / "rank0"))
                seconds.append(_join(root, num_records, world_size, is_cold=case.startswith("cold")))
    medians = {f"{case}_seconds": statistics.median(seconds) for case, seconds in cases.items()}
    return {
        "num_records": num_records,
        "world_size": world_size,
        **medians,
        "reads_of_one_rank_warm_seconds": statistics.median(reads),
        "cold": page_cache_method(),
    }


def _prepare(root: Path, case: str) -> None:
    if not case.endswith("hint"):
        for hint in root.glob(f"rank*/{JOIN_INDEX_NAME}"):
            hint.unlink()


def _read_seconds(path: Path) -> float:
    start = time.perf_counter()
    read_first_blocks(path)
    return time.perf_counter() - start


def _join(root: Path, num_records: int, world_size: int, *, is_cold: bool) -> float:
    with open_processes(world_size, root) as group:
        if is_cold:
            drop_page_cache(root)
        with group.joined() as (leader, seconds):
            num_kept = leader.report.num_kept
    if num_kept != num_records:
        raise RuntimeError(f"{num_kept} of {num_records} records were kept")
    return seconds
