"""The benchmarks' group of processes joins over what it finds, and parts in order."""

from __future__ import annotations

from flare_cache.join_index import JOIN_INDEX_NAME
from flare_qualify.many_records import write_records
from flare_qualify.rank_processes import bench_plan, open_processes


def test_a_group_of_processes_keeps_the_records_of_all_and_leaves_hints(tmp_path, capfd) -> None:
    plan = bench_plan(2, None)
    fingerprint = plan.cache_settings(0).identity.fingerprint()
    for geometry, number in zip(plan.geometries, (30, 20), strict=True):
        write_records(tmp_path / f"rank{geometry.rank}", number, geometry=geometry, set_fingerprint=fingerprint)
    with open_processes(2, tmp_path) as group, group.joined() as (leader, seconds):
        assert leader.report.num_kept == 20
        assert seconds > 0
    assert all((tmp_path / f"rank{rank}" / JOIN_INDEX_NAME).exists() for rank in range(2))
    assert capfd.readouterr().err == ""
