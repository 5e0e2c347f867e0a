"""What the engine counts, and the frozen view of it that status pages and exporters read."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec

from flare_core.engine.page_pool import PagePool
from flare_core.engine.sequence import Sequence
from flare_core.metrics import LATENCY_BOUNDS_SECONDS
from flare_core.prefix import Tier

__all__ = ["EngineSnapshot", "Histogram", "HistogramSnapshot", "Statistics"]


class HistogramSnapshot(msgspec.Struct, frozen=True):
    """Counts of ``metrics.LATENCY_BOUNDS_SECONDS``' buckets (not cumulative), the last one unbounded."""

    counts: tuple[int, ...]
    sum_seconds: float


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine at one moment; counters count from its start."""

    running: int
    waiting: int
    fetching: int
    pages_free: int
    pages_held: int
    pages_cached: int
    pages_quarantined: int
    num_steps: int
    own_seconds: float
    num_preemptions: int
    num_lookups: int
    num_store_failures: int
    prompt_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    lookup_tokens: int
    hit_tokens: dict[Tier, int]
    finished: dict[str, int]
    ttft: HistogramSnapshot
    itl: HistogramSnapshot
    queue: HistogramSnapshot
    restore: HistogramSnapshot


@dataclass(slots=True)
class Histogram:
    """Durations in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_SECONDS) + 1))
    sum_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds

    def snapshot(self) -> HistogramSnapshot:
        """A copy."""
        return HistogramSnapshot(tuple(self.counts), self.sum_seconds)


@dataclass(slots=True)
class Statistics:
    """Counters, written by the engine thread only."""

    num_steps: int = 0
    own_seconds: float = 0.0
    num_preemptions: int = 0
    num_lookups: int = 0
    num_store_failures: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    lookup_tokens: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    finished: dict[str, int] = field(default_factory=dict)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    restore: Histogram = field(default_factory=Histogram)

    def count_outputs(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """A step has decided so many tokens of ``sequence``."""
        for _ in range(num_tokens):
            if sequence.num_outputs:
                self.itl.add(now - sequence.last_token_at)
            else:
                self.ttft.add(now - sequence.request.arrival)
            sequence.num_outputs += 1
            sequence.last_token_at = now
        self.output_tokens += num_tokens

    def count_finish(self, reason: str) -> None:
        """One request ended."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def snapshot(self, *, running: int, waiting: int, fetching: int, pool: PagePool) -> EngineSnapshot:
        """Everything now."""
        return EngineSnapshot(
            running=running,
            waiting=waiting,
            fetching=fetching,
            pages_free=pool.num_free,
            pages_held=pool.num_held,
            pages_cached=pool.num_cached,
            pages_quarantined=pool.num_quarantined,
            num_steps=self.num_steps,
            own_seconds=self.own_seconds,
            num_preemptions=self.num_preemptions,
            num_lookups=self.num_lookups,
            num_store_failures=self.num_store_failures,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            lookup_tokens=self.lookup_tokens,
            hit_tokens=dict(self.hit_tokens),
            finished=dict(self.finished),
            ttft=self.ttft.snapshot(),
            itl=self.itl.snapshot(),
            queue=self.queue.snapshot(),
            restore=self.restore.snapshot(),
        )
