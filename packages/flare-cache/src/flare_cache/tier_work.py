"""What is on its way into a tier of records or out of it, and what has been settled. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from flare_cache.index import Record
from flare_cache.jobs import JobOp
from flare_cache.record_plan import PlannedRecord

__all__ = ["Removal", "Store", "StoreEnd", "Wish"]


@dataclass(frozen=True, slots=True)
class StoreEnd:
    """One record of a store request is settled: stored, or why not."""

    ticket: int
    failure: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """A planned record, and who asked for it."""

    planned: PlannedRecord
    ticket: int
    after_step: int


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A planned record on its way."""

    record: Record
    wish: Wish


@dataclass(frozen=True, slots=True)
class Removal:
    """An unlink, or a truncation that gives back ``num_bytes``; ``successor`` is stored under the name then."""

    record: Record
    op: JobOp
    num_bytes: int
    successor: Wish | None = None
