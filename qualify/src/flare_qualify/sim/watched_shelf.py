"""A shelf that tells when each job begins and ends to use pages. Changes nothing of what the shelf behind it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flare_cache.jobs import Job
from flare_cache.transfer import Part, PoolPort, Shelf, Transfer
from flare_core.ports import PageMemory

if TYPE_CHECKING:
    from flare_qualify.sim.process import RankProcess

__all__ = ["TransferWatch", "WatchedPool", "WatchedShelf"]


class TransferWatch(Protocol):
    """Who is told."""

    def job_begins(self, process: RankProcess, job: Job) -> None:
        """From now on the job touches its pages on this rank."""
        ...

    def job_ends(self, process: RankProcess, job: Job, *, is_ok: bool) -> None:
        """It touches them no more."""
        ...

    def step_computed(self, step: int) -> None:
        """Every rank has computed a step."""
        ...


@dataclass(frozen=True, slots=True)
class WatchedShelf:
    """See the module."""

    shelf: Shelf
    process: RankProcess
    watch: TransferWatch

    def store(self, job: Job, memory: PageMemory) -> _WatchedTransfer:
        """See the port; the same for all that follow."""
        self.watch.job_begins(self.process, job)
        try:
            transfer = self.shelf.store(job, memory)
        except Exception:
            self.watch.job_ends(self.process, job, is_ok=False)
            raise
        return _WatchedTransfer(transfer, self, job)

    def fetch(self, job: Job, memory: PageMemory) -> _WatchedTransfer:
        """A fetch."""
        self.watch.job_begins(self.process, job)
        try:
            transfer = self.shelf.fetch(job, memory)
        except Exception:
            self.watch.job_ends(self.process, job, is_ok=False)
            raise
        return _WatchedTransfer(transfer, self, job)

    def truncate(self, job: Job) -> int:
        """A truncation touches no page."""
        return self.shelf.truncate(job)

    def unlink(self, job: Job) -> int:
        """Nor does an unlink."""
        return self.shelf.unlink(job)


@dataclass(frozen=True, slots=True)
class WatchedPool:
    """The same, for the pool."""

    pool: PoolPort
    process: RankProcess
    watch: TransferWatch

    def fetch(self, job: Job, memory: PageMemory, *, since: float) -> _WatchedTransfer:
        """A fetch."""
        self.watch.job_begins(self.process, job)
        try:
            transfer = self.pool.fetch(job, memory, since=since)
        except Exception:
            self.watch.job_ends(self.process, job, is_ok=False)
            raise
        return _WatchedTransfer(transfer, self, job)

    def put(self, job: Job, *, since: float) -> Transfer:
        """A put touches no page."""
        return self.pool.put(job, since=since)


@dataclass(slots=True)
class _WatchedTransfer:
    transfer: Transfer
    owner: WatchedShelf | WatchedPool
    job: Job

    @property
    def parts(self) -> Sequence[Part]:
        return self.transfer.parts

    def run(self, part: Part) -> None:
        self.transfer.run(part)

    def finish(self) -> int:
        num_bytes = self.transfer.finish()
        self.owner.watch.job_ends(self.owner.process, self.job, is_ok=True)
        return num_bytes

    def abandon(self) -> bool:
        is_clean = self.transfer.abandon()
        self.owner.watch.job_ends(self.owner.process, self.job, is_ok=False)
        return is_clean
