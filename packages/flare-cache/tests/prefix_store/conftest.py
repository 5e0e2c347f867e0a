"""A prefix store over scripted ranks: the test says what becomes of each job, and when it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest

from flare_cache.eviction import Budget
from flare_cache.index import RecordIndex
from flare_cache.jobs import Job, JobOp, JobStatus
from flare_cache.outcomes import Done, Failed, Outcome, RankFailure, Withdrawal, Withdrawn
from flare_cache.record_plan import FileSizes, RecordBounds
from flare_cache.testing import token_geometries
from flare_cache.tier_store import TierContent, TierStore
from flare_core.keys import chain_keys, root_key, token_array
from flare_core.prefix import PrefixQuery, StoreFinished, StoreRequest, Tier

PAGE = 4
ROOT = root_key(bytes(32), b"")
SIZES = FileSizes(token_geometries(1, row_bytes=100))


@dataclass
class Waiting:
    job: Job
    tag: int
    expires_at: float | None


class Script:
    """Takes jobs; the test says what becomes of each."""

    def __init__(self) -> None:
        self.open: list[Waiting] = []
        self.outcomes: list[Outcome] = []
        self.cancelled: list[int] = []
        self.ids = itertools.count(1)

    def submit(self, job: Job, *, tag: int, num_bytes: int, expires_at: float | None = None) -> None:
        assert job.job_id == 0
        assert num_bytes >= 0
        self.open.append(Waiting(msgspec.structs.replace(job, job_id=next(self.ids)), tag, expires_at))

    def cancel(self, tag: int) -> None:
        self.cancelled.append(tag)

    def take(self) -> list[Outcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def end(self, waiting: Waiting, how: str = "done", *, reason: str = "EIO: broken", rank: int = 1) -> None:
        self.open.remove(waiting)
        failure = RankFailure(rank, JobStatus.FAILED, reason)
        match how:
            case "done":
                self.outcomes.append(Done(waiting.tag, waiting.job, 1, {0: 0.1}))
            case "failed":
                self.outcomes.append(Failed(waiting.tag, waiting.job, (failure,), (), {0: 0.1, 1: 0.2}))
            case "unclean":
                self.outcomes.append(Failed(waiting.tag, waiting.job, (failure,), (failure,), {0: 0.1, 1: 0.2}))
            case "late":
                self.outcomes.append(Withdrawn(waiting.tag, waiting.job, Withdrawal.LATE))
            case _:
                self.outcomes.append(Withdrawn(waiting.tag, waiting.job, Withdrawal.CANCELLED))


class Bench:
    """A store, its script and its clock."""

    def __init__(self, *, limit: int = 1 << 30, max_sections: int = 1, has_rows: bool = False, tiers=(Tier.DISK,)):
        self.script = Script()
        self.now = 0.0
        self.content = {tier: TierContent(RecordIndex(PAGE), Budget(limit)) for tier in tiers}
        numbers = itertools.count()
        self.store = TierStore(
            self.content,
            bounds=RecordBounds(PAGE, max_sections, 1),
            sizes=SIZES,
            jobs=self.script,
            has_rows=has_rows,
            clock=lambda: self.now,
            draw_store_id=lambda: next(numbers).to_bytes(16, "little"),
        )
        self.events: dict[int, object] = {}

    def ask(self, tokens: Sequence[int], *, row: bool = False) -> int | None:
        ids = token_array(tokens)
        keys = chain_keys(ROOT, ids, PAGE)
        tail = 50 if len(tokens) % PAGE else None
        return self.store.store(StoreRequest(ROOT, ids, keys, list(range(len(keys))), tail, 1 if row else None, 1))

    def poll(self) -> None:
        for event in self.store.poll():
            assert event.ticket not in self.events
            self.events[event.ticket] = event

    def end(self, how: str = "done", *, op: JobOp | None = None, last: bool = False, **failure: object) -> None:
        """End the first (or last) open job of this kind; ``failure`` is its ``reason`` and ``rank``."""
        found = [waiting for waiting in self.script.open if op is None or waiting.job.op is op]
        self.script.end(found[-1 if last else 0], how, **failure)
        self.poll()

    def run(self) -> None:
        self.poll()
        while self.script.open:
            self.end()

    def put(self, tokens: Sequence[int], **options) -> StoreFinished:
        ticket = self.ask(tokens, **options)
        self.run()
        return self.events[ticket]

    def query(self, tokens: Sequence[int]) -> PrefixQuery:
        ids = token_array(tokens)
        return PrefixQuery(ROOT, ids, chain_keys(ROOT, ids, PAGE))

    def get(self, tokens: Sequence[int], restorable=None) -> int:
        query = self.query(tokens)
        restorable = restorable or self.store.lookup(query)
        return self.store.fetch(query, restorable, pages=list(range(60)), row_slot=0, after_step=0)

    def ops(self) -> list[JobOp]:
        return [waiting.job.op for waiting in self.script.open]

    def charged(self, tier: Tier = Tier.DISK) -> int:
        return self.content[tier].budget.charged_bytes


@pytest.fixture(scope="session")
def new_bench():
    """``new_bench(limit=..., max_sections=..., has_rows=..., tiers=...)``: a :class:`Bench`."""
    return Bench
