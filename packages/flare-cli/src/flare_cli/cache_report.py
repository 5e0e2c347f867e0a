"""The record path for people and for ``/v1/cluster``: what the join agreed, and what came since. Values only."""

from __future__ import annotations

from flare_cache.join_report import JoinReport, RankReport
from flare_cache.record_group import LeaderGroup
from flare_cli.config import RunConfig
from flare_cli.snapshot import CacheSnapshot, JobSnapshot, TierSnapshot
from flare_cli.units import format_size

__all__ = ["cache_facts", "cache_snapshot"]


_SURVIVES = {"process": "the death of any process", "power": "a power cut"}


def cache_facts(
    config: RunConfig, report: JoinReport, *, direct: bool, least_bytes: int
) -> tuple[tuple[str, str], ...]:
    """(label, text) lines about both tiers, as agreed by all ranks.

    ``direct``: this rank's disk I/O is O_DIRECT; ``least_bytes``: the smallest record.
    """
    facts: list[tuple[str, str]] = []
    if report.disk_limit_bytes:
        limits = ", ".join(_limit(each) for each in report.ranks)
        how = "direct" if direct else "buffered"
        lasting = _SURVIVES[config.prefix_cache_durability]
        facts.append(("disk cache", f"{config.prefix_cache_disk}, {how} I/O, records survive {lasting}"))
        facts.append(("disk limit", f"{format_size(report.disk_limit_bytes)} a rank, the least of all: {limits}"))
        if report.disk_limit_bytes < least_bytes:
            facts.append(("warning", f"nothing will be stored on disk: a record takes {format_size(least_bytes)}"))
        facts.append(("records", f"{report.num_kept} kept, {format_size(report.kept_bytes)}{_dropped(report)}"))
    if report.memory_limit_bytes:
        facts.append(("memory cache", f"{format_size(report.memory_limit_bytes)} a rank"))
    return tuple(facts)


def _limit(rank: RankReport) -> str:
    derived = " (from free space)" if rank.is_limit_derived else ""
    return f"rank {rank.rank} {format_size(rank.disk_limit_bytes)}{derived}"


def _dropped(report: JoinReport) -> str:
    notes: list[str] = []
    for rank in report.ranks:
        dropped = [
            f"{count} {verdict}" for verdict, count in sorted(rank.verdicts.items()) if count and verdict != "kept"
        ]
        if rank.num_truncated:
            dropped.append(f"{rank.num_truncated} truncated")
        if rank.num_left:
            dropped.append(f"{rank.num_left} of another set or format left alone")
        if dropped:
            notes.append(f"rank {rank.rank}: {', '.join(dropped)}")
    return f" ({'; '.join(notes)})" if notes else ""


def cache_snapshot(leader: LeaderGroup) -> CacheSnapshot:
    """The record path now."""
    statistics = leader.store.statistics(
        num_jobs_waiting=leader.dispatcher.num_waiting, num_jobs_outstanding=leader.dispatcher.num_outstanding
    )
    verdicts: dict[str, int] = {}
    for rank in leader.report.ranks:
        for verdict, count in rank.verdicts.items():
            verdicts[verdict] = max(verdicts.get(verdict, 0), count)
    return CacheSnapshot(
        tiers=tuple(
            TierSnapshot(
                tier=str(tier),
                num_records=found.num_records,
                charged_bytes=found.charged_bytes,
                limit_bytes=found.limit_bytes,
                num_stores_pending=found.num_stores_pending,
                num_fetches_pending=found.num_fetches_pending,
                records_stored=statistics.records_stored.get(tier, 0),
                records_evicted=statistics.records_evicted.get(tier, 0),
                records_failed=statistics.records_failed.get(tier, 0),
                stores_stopped=found.stores_stopped,
                reads_stopped=found.reads_stopped,
            )
            for tier, found in statistics.tiers.items()
        ),
        jobs=tuple(
            JobSnapshot(
                rank=rank,
                op=str(op),
                counts=times.counts,
                sum_seconds=times.sum_seconds,
                num_bytes=times.num_bytes,
                failures=dict(times.failures),
            )
            for rank, by_op in sorted(statistics.job_times.items())
            for op, times in by_op.items()
        ),
        stores_dropped=dict(statistics.stores_dropped),
        join=verdicts,
        num_jobs_waiting=statistics.num_jobs_waiting,
        num_jobs_outstanding=statistics.num_jobs_outstanding,
    )
