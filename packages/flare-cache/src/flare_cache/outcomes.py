"""The words of the sharded transport: its limits, what becomes of a job, and what the machine asks its shell to do."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flare_cache.jobs import Job, JobStatus
from flare_cache.record_link import RECORD_JOB

__all__ = [
    "Done",
    "Effect",
    "Failed",
    "Outcome",
    "Poison",
    "RankFailure",
    "Report",
    "RunHere",
    "Send",
    "ShardedLimits",
    "Withdrawal",
    "Withdrawn",
    "describe_failures",
]


@dataclass(frozen=True, slots=True)
class ShardedLimits:
    """Bounds of the sharded transport.

    Attributes:
        max_outstanding: jobs that ranks work on at a time; the rest waits at rank zero. Pool jobs are not among them:
            ``max_pool_fetches`` and ``max_pool_puts`` bound those.
        started_seconds: from sending a job until a peer must have accepted it.
        base_seconds, floor_bytes_per_second, max_job_seconds: a rank must have answered within
            min(max, base + bytes it has been given / floor) of being able to begin.
        max_frame_bytes: a job that does not fit such a frame fails before any rank begins.
    """

    max_outstanding: int = 8
    max_pool_fetches: int = 4
    max_pool_puts: int = 4
    started_seconds: float = 10.0
    base_seconds: float = 5.0
    floor_bytes_per_second: float = 20e6
    max_job_seconds: float = 120.0
    max_frame_bytes: int = RECORD_JOB.max_bytes


class Withdrawal(enum.StrEnum):
    """Why a job never began."""

    CANCELLED = "cancelled"
    LATE = "late"
    TOO_LARGE = "too-large"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's answer that was not OK."""

    rank: int
    status: JobStatus
    reason: str


def describe_failures(failures: Sequence[RankFailure], cleanup: Sequence[RankFailure] = ()) -> str:
    """What went wrong on which rank, and which ranks keep a part that they could not remove."""
    text = "; ".join(f"rank {failure.rank}: {failure.reason}" for failure in failures)
    kept = "; ".join(f"rank {failure.rank}: {failure.reason}" for failure in cleanup)
    return f"{text} (and what was written could not be removed: {kept})" if kept else text


@dataclass(frozen=True, slots=True)
class Done:
    """Every rank finished the job. ``num_bytes`` is the largest rank's; ``seconds`` from sending to answer, by rank."""

    tag: int
    job: Job
    num_bytes: int
    seconds: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """Every rank is accounted for and some failed. A failed store is visible on no rank; ``cleanup`` names ranks
    that still hold a part that no lookup and no join will ever use."""

    tag: int
    job: Job
    failures: tuple[RankFailure, ...]
    cleanup: tuple[RankFailure, ...]
    seconds: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The job never began on any rank."""

    tag: int
    job: Job
    reason: Withdrawal


Outcome = Done | Failed | Withdrawn


@dataclass(frozen=True, slots=True)
class Send:
    """Queue a RECORD_JOB frame on the link of ``rank``."""

    rank: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class RunHere:
    """Submit the job to rank zero's own staged transport."""

    job: Job


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the submitter."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Poison:
    """Stop: shut every link so that the peers drain, and end the process. ``reason`` begins with a ``PoisonReason``."""

    reason: str


Effect = Send | RunHere | Report | Poison
