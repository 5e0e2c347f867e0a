"""The record path for people and for ``/v1/cluster``: what the join agreed, and what came since. Values only."""

from __future__ import annotations

from flare_cache.join_report import JoinReport, RankReport
from flare_cache.record_group import LeaderGroup
from flare_cli.config import RunConfig
from flare_cli.snapshot import CacheSnapshot, JobSnapshot, PoolSnapshot, TierSnapshot
from flare_cli.units import format_size

__all__ = ["cache_facts", "cache_snapshot"]

SHOWN_PENDING = 100

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
    if config.pool is not None:
        how = "TLS" if config.pool.is_tls else "authenticated, not encrypted"
        facts.append(("pool", f"{config.pool} ({how}); on when every rank has joined it, till then local tiers serve"))
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


def pool_snapshot(leader: LeaderGroup, config: RunConfig, *, now: float, with_records: bool) -> PoolSnapshot | None:
    """The pool as rank zero sees it; ``now``: monotonic seconds."""
    agent, tier = leader.pool, leader.store.pool
    if agent is None or tier is None:
        return None
    status, found = agent.status, tier.statistics()
    return PoolSnapshot(
        url=str(config.pool),
        state=str(status.state),
        reasons={"all" if rank < 0 else str(rank): reason for rank, reason in sorted(status.reasons.items())},
        state_seconds=now - status.since,
        sessions=status.num_sessions,
        records_in_pool=found.num_in_pool,
        records_known=found.num_known,
        pending=found.num_pending,
        pending_bytes=found.pending_bytes,
        pending_limit_bytes=found.limit_bytes,
        pending_keys=tuple(key.hex() for key in tier.pending_keys()[:SHOWN_PENDING]),
        backlog=found.num_backlog,
        records_put=found.num_put,
        dropped=dict(found.dropped),
        lookups=found.num_lookups,
        lookups_unanswered=found.num_unanswered,
        restores_refused=found.rates.num_refused,
        pool_latency_seconds=found.rates.pool_seconds,
        pool_bytes_per_second=found.rates.pool_bytes_per_second,
        prefill_tokens_per_second=found.rates.prefill_tokens_per_second,
        records=tier.record_states() if with_records else None,
    )


def cache_snapshot(leader: LeaderGroup, config: RunConfig, *, now: float, with_records: bool = False) -> CacheSnapshot:
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
        pool=pool_snapshot(leader, config, now=now, with_records=with_records),
    )
