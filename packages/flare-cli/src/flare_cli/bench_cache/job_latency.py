"""What a job costs beside its bytes: planning, links and acknowledgements, measured on jobs of one 4096-byte page.

In the memory tier a job moves one page and touches no disk, so that nearly all of its time is that overhead; the same
job on disk is measured beside it.
"""

from __future__ import annotations

import statistics
import time

import msgspec

from flare_cache.record import MAX_HEADER_BYTES
from flare_cache.staged import DEFAULT_NUM_THREADS
from flare_cli.bench_cache.group import BenchGroup
from flare_cli.bench_cache.orders import OrderKind
from flare_cli.bench_cache.prompt import Prompt
from flare_cli.bench_cache.settings import GroupSettings
from flare_core.geometry import PAGE_ALIGNMENT
from flare_core.prefix import Tier

__all__ = ["TARGET_SECONDS", "JobLatency", "TierLatency", "latency_settings", "measure_latency"]

TARGET_SECONDS = 0.002
_NUM_PAGES = 64


class TierLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Restores of one page, one job each, one at a time.

    Attributes:
        seconds: of each, from lookup to the last rank's acknowledgement.
        sent_seconds: of each, the part until the job had been planned and sent to every rank.
    """

    tier: Tier
    seconds: tuple[float, ...]
    sent_seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """Of the whole job."""
        return statistics.median(self.seconds)

    @property
    def p95_seconds(self) -> float:
        """95th percentile of the whole job."""
        return sorted(self.seconds)[len(self.seconds) * 95 // 100]

    @property
    def sent_median_seconds(self) -> float:
        """Of planning and sending alone."""
        return statistics.median(self.sent_seconds)


class JobLatency(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers' latencies at one world size."""

    world_size: int
    tiers: tuple[TierLatency, ...]

    @property
    def overhead_seconds(self) -> float:
        """Median of the memory tier: planning, links, acknowledgements, and a copy of 4096 bytes."""
        return next(tier.median_seconds for tier in self.tiers if tier.tier is Tier.MEMORY)


def latency_settings(directory: str, world_size: int) -> GroupSettings:
    """A group of small records: one page each."""
    return GroupSettings(
        world_size=world_size,
        directory=directory,
        bytes_per_rank=_NUM_PAGES * PAGE_ALIGNMENT,
        page_bytes=PAGE_ALIGNMENT,
        record_bytes=MAX_HEADER_BYTES + PAGE_ALIGNMENT,
        num_threads=DEFAULT_NUM_THREADS,
        num_outstanding=8,
        memory_bytes=_NUM_PAGES * 4 * PAGE_ALIGNMENT,
    )


def measure_latency(group: BenchGroup, settings: GroupSettings, num_jobs: int) -> JobLatency:
    """Store the small records in both tiers, then restore ``num_jobs`` single pages from each.

    Raises:
        FlareError: a store or a restore failed, or a page is not what was stored.
    """
    group.carry_out(OrderKind.FILL)
    prompt = Prompt.make(settings)
    group.store(prompt.request())
    group.carry_out(OrderKind.WIPE)
    memory = _measure_tier(group, prompt, Tier.MEMORY, num_jobs)
    # Lookups take the cheapest tier.
    group.forget_memory()
    group.carry_out(OrderKind.WIPE)
    disk = _measure_tier(group, prompt, Tier.DISK, num_jobs)
    return JobLatency(world_size=settings.world_size, tiers=(memory, disk))


def _measure_tier(group: BenchGroup, prompt: Prompt, tier: Tier, num_jobs: int) -> TierLatency:
    totals: list[float] = []
    sent: list[float] = []
    # The first round over all pages warms up; afterwards every page has been restored.
    for number in range(_NUM_PAGES + num_jobs):
        page = number % _NUM_PAGES
        query = prompt.query(first_page=page, end_page=page + 1)
        start = time.perf_counter()
        sent_seconds = group.restore(query, tier)
        if number >= _NUM_PAGES:
            totals.append(time.perf_counter() - start)
            sent.append(sent_seconds)
    group.carry_out(OrderKind.VERIFY)
    return TierLatency(tier=tier, seconds=tuple(totals), sent_seconds=tuple(sent))
