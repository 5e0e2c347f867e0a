"""Jobs that wait at rank zero for a credit: by kind, the most urgent kind first. Pure; knows no rank and no clock.

Jobs of the pool have credits of their own, so that a slow pool holds up no disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flare_cache.jobs import Job, JobOp
from flare_cache.outcomes import ShardedLimits
from flare_core.prefix import Tier

__all__ = ["JobQueues", "Waiting", "credit_of"]

Credit = str
"""Which jobs share a limit."""

_RECORDS, _POOL_FETCH, _POOL_PUT = "records", "pool-fetch", "pool-put"

# Restores first: a request waits for them. Removals before stores: stores wait for their space.
_ORDER = (JobOp.FETCH, JobOp.UNLINK, JobOp.TRUNCATE, JobOp.STORE, JobOp.PUT)


def credit_of(job: Job) -> Credit:
    """Which limit the job counts against."""
    if job.tier is not Tier.POOL:
        return _RECORDS
    return _POOL_PUT if job.op is JobOp.PUT else _POOL_FETCH


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A submitted job. ``expires_at``: it is dropped if it has not begun by then."""

    tag: int
    job: Job
    num_bytes: int
    expires_at: float | None


def _queues() -> dict[tuple[Credit, JobOp], deque[Waiting]]:
    return {(credit, op): deque() for op in _ORDER for credit in (_RECORDS, _POOL_FETCH, _POOL_PUT)}


@dataclass(slots=True)
class JobQueues:
    """See the module."""

    limits: ShardedLimits
    _queues: dict[tuple[Credit, JobOp], deque[Waiting]] = field(default_factory=_queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, waiting: Waiting) -> None:
        """Queue a job."""
        self._queues[credit_of(waiting.job), waiting.job.op].append(waiting)

    def next(self, num_outstanding: Mapping[Credit, int]) -> Waiting | None:
        """The most urgent job for which there is a credit, taken out; None when there is none."""
        for (credit, _), queue in self._queues.items():
            if queue and num_outstanding.get(credit, 0) < self._limit(credit):
                return queue.popleft()
        return None

    def take_tagged(self, tag: int) -> list[Waiting]:
        """What carries ``tag``, taken out."""
        return self._take([waiting for waiting in self.all() if waiting.tag == tag])

    def take_late(self, now: float) -> list[Waiting]:
        """What has expired, taken out."""
        return self._take([each for each in self.all() if each.expires_at is not None and now >= each.expires_at])

    def all(self) -> Iterator[Waiting]:
        """Every job that waits, the most urgent kind first."""
        for queue in self._queues.values():
            yield from queue

    def _take(self, chosen: list[Waiting]) -> list[Waiting]:
        for waiting in chosen:
            self._queues[credit_of(waiting.job), waiting.job.op].remove(waiting)
        return chosen

    def _limit(self, credit: Credit) -> int:
        limits = self.limits
        by_credit = {_POOL_FETCH: limits.max_pool_fetches, _POOL_PUT: limits.max_pool_puts}
        return by_credit.get(credit, limits.max_outstanding)
