"""How long jobs took and how they failed on one rank: plain counts for ``flare_cache_job_seconds`` and its kin."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from flare_cache.jobs import JobOp, JobResult, JobStatus

__all__ = ["BUCKET_SECONDS", "JobTimes", "OpTimes", "reason_code"]

BUCKET_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram's buckets; one more bucket holds what took longer."""


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Jobs of one kind.

    Attributes:
        counts: jobs by bucket, not cumulative; ``len(BUCKET_SECONDS) + 1`` of them.
        sum_seconds: from the job's start (not its arrival) to its end.
        num_bytes: bytes moved by those that succeeded.
        failures: failed jobs by reason code.
    """

    counts: tuple[int, ...]
    sum_seconds: float
    num_bytes: int
    failures: Mapping[str, int]


def reason_code(reason: str) -> str:
    """The first word of a result's reason (``section-digest``, ``ENOSPC``): few values, fit for a label."""
    return reason.partition(":")[0]


@dataclass(slots=True)
class _Counts:
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_SECONDS) + 1))
    sum_seconds: float = 0.0
    num_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class JobTimes:
    """Thread-safe counters; never blocks for long."""

    _ops: dict[JobOp, _Counts] = field(default_factory=lambda: {op: _Counts() for op in JobOp})
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def record(self, op: JobOp, result: JobResult, seconds: float) -> None:
        """Count one ended job."""
        with self._mutex:
            counts = self._ops[op]
            counts.buckets[bisect.bisect_left(BUCKET_SECONDS, seconds)] += 1
            counts.sum_seconds += seconds
            if result.status is JobStatus.OK:
                counts.num_bytes += result.num_bytes
            else:
                code = reason_code(result.reason)
                counts.failures[code] = counts.failures.get(code, 0) + 1

    def count_failure(self, op: JobOp, reason: str) -> None:
        """Count a failure that was no job of its own: an undoing."""
        with self._mutex:
            failures = self._ops[op].failures
            code = reason_code(reason)
            failures[code] = failures.get(code, 0) + 1

    def snapshot(self) -> dict[JobOp, OpTimes]:
        """The counts now."""
        with self._mutex:
            return {
                op: OpTimes(tuple(c.buckets), c.sum_seconds, c.num_bytes, dict(c.failures))
                for op, c in self._ops.items()
            }
