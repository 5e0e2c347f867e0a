"""What the record path counts, for ``/metrics`` and the cluster snapshot. Written by one thread, read by any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from flare_cache.job_times import JobTimes, OpTimes
from flare_cache.jobs import JobOp, JobResult, JobStatus
from flare_cache.outcomes import Done, Failed, Outcome, Withdrawn
from flare_core.prefix import Tier

__all__ = ["CacheCounters", "CacheStatistics", "TierStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """One tier now: records, bytes charged on the rank where they are most, the agreed limit, and jobs on their way.

    ``stores_stopped``, ``reads_stopped``: why the tier takes or gives nothing, as ``tier_health`` judges; or None.
    """

    tier: Tier
    num_records: int
    charged_bytes: int
    limit_bytes: int
    num_stores_pending: int
    num_fetches_pending: int
    stores_stopped: str | None
    reads_stopped: str | None


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A copy of all counters.

    Attributes:
        tiers: by tier.
        hit_tokens: tokens restored, counted after every rank verified them.
        records_stored, records_evicted, records_failed: whole records, by tier.
        stores_dropped: records that were not stored, by reason: "failed" on some rank; "parent", as what it extends was
            not stored; "late", "too-large" for a job; "full", the limit; "paused", no place; "stopped", a failing disk.
        job_times: by rank and operation, from sending to answer.
        num_jobs_waiting, num_jobs_outstanding: at rank zero, and on ranks.
    """

    tiers: Mapping[Tier, TierStatistics]
    hit_tokens: Mapping[Tier, int]
    records_stored: Mapping[Tier, int]
    records_evicted: Mapping[Tier, int]
    records_failed: Mapping[Tier, int]
    stores_dropped: Mapping[str, int]
    job_times: Mapping[int, Mapping[JobOp, OpTimes]]
    num_jobs_waiting: int = 0
    num_jobs_outstanding: int = 0


@dataclass(slots=True)
class CacheCounters:
    """The counters behind :class:`CacheStatistics`."""

    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    records_stored: Counter[Tier] = field(default_factory=Counter)
    records_evicted: Counter[Tier] = field(default_factory=Counter)
    records_failed: Counter[Tier] = field(default_factory=Counter)
    stores_dropped: Counter[str] = field(default_factory=Counter)
    job_times: dict[int, JobTimes] = field(default_factory=dict)

    def count_job(self, outcome: Outcome) -> None:
        """Count a job's time on each rank, and each rank's failure."""
        if isinstance(outcome, Withdrawn):
            return
        job = outcome.job
        num_bytes = outcome.num_bytes if isinstance(outcome, Done) else 0
        results = dict.fromkeys(outcome.seconds, JobResult(job_id=job.job_id, status=JobStatus.OK, num_bytes=num_bytes))
        if isinstance(outcome, Failed):
            for failure in outcome.failures:
                results[failure.rank] = JobResult(job_id=job.job_id, status=failure.status, reason=failure.reason)
            for failure in outcome.cleanup:
                self.job_times.setdefault(failure.rank, JobTimes()).count_failure(JobOp.UNLINK, failure.reason)
        for rank, result in results.items():
            self.job_times.setdefault(rank, JobTimes()).record(job.op, result, outcome.seconds[rank])
