"""Store once, then restore and read raw in turns, each from disk; every restore is compared with what was stored."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from flare_cli.bench_cache.group import BenchGroup
from flare_cli.bench_cache.orders import OrderKind
from flare_cli.bench_cache.page_cache import drop_page_cache
from flare_cli.bench_cache.prompt import Prompt
from flare_cli.bench_cache.settings import GroupSettings
from flare_core.prefix import Tier

__all__ = ["TARGET_RATIO", "Round", "StoredPrompt", "Throughput", "measure_throughput", "store_prompt"]

TARGET_RATIO = 0.85


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round: seconds until the slowest rank was done."""

    restore_seconds: float
    raw_seconds: float
    restore_first: bool

    @property
    def ratio(self) -> float:
        """Restored bytes/s over raw bytes/s."""
        return self.raw_seconds / self.restore_seconds


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What one world size gave.

    Attributes:
        num_bytes: page bytes of all ranks together; rates are of these.
        num_records: files of each rank.
        direct: O_DIRECT; else buffered with a cold page cache.
        store_seconds: until every record was stored on every rank (not synced).
        rounds: in the order in which they ran.
    """

    world_size: int
    num_bytes: int
    num_records: int
    direct: bool
    store_seconds: float
    rounds: tuple[Round, ...]

    @property
    def store_rate(self) -> float:
        """Bytes/s."""
        return self.num_bytes / self.store_seconds

    @property
    def restore_rate(self) -> float:
        """Bytes/s, median."""
        return self.num_bytes / statistics.median(entry.restore_seconds for entry in self.rounds)

    @property
    def raw_rate(self) -> float:
        """Bytes/s, median."""
        return self.num_bytes / statistics.median(entry.raw_seconds for entry in self.rounds)

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios: each compares two reads that ran one after the other."""
        return statistics.median(entry.ratio for entry in self.rounds)


class StoredPrompt:
    """A prompt that a group has stored, and the two ways to read it back."""

    def __init__(self, group: BenchGroup, settings: GroupSettings, prompt: Prompt) -> None:
        self._group = group
        self._directory = Path(settings.directory)
        self._query = prompt.query()

    def restore(self) -> float:
        """Wipe the pages, restore them from disk, verify them; seconds from lookup to the last rank's last answer."""
        self._group.carry_out(OrderKind.WIPE)
        drop_page_cache(self._directory)
        start = time.perf_counter()
        self._group.restore(self._query, Tier.DISK)
        seconds = time.perf_counter() - start
        self._group.carry_out(OrderKind.VERIFY)
        return seconds

    def raw_read(self) -> float:
        """Read the same sections of the same files; seconds until the last rank was done."""
        drop_page_cache(self._directory)
        return self._group.carry_out(OrderKind.RAW_READ)


def store_prompt(group: BenchGroup, settings: GroupSettings) -> tuple[StoredPrompt, int, float]:
    """Fill all pages and store them; the stored prompt, its number of records and the seconds of the store."""
    group.carry_out(OrderKind.FILL)
    prompt = Prompt.make(settings)
    start = time.perf_counter()
    num_records = group.store(prompt.request())
    seconds = time.perf_counter() - start
    group.carry_out(OrderKind.SCAN)
    return StoredPrompt(group, settings, prompt), num_records, seconds


def measure_throughput(
    group: BenchGroup, settings: GroupSettings, num_rounds: int, *, advance: Callable[[], None] = lambda: None
) -> Throughput:
    """Store, then ``num_rounds`` rounds; ``advance`` is called after the store and after each round.

    Raises:
        FlareError: a store or a restore failed, or a restored page is not what was stored.
    """
    prompt, num_records, store_seconds = store_prompt(group, settings)
    advance()
    rounds: list[Round] = []
    for number in range(num_rounds):
        restore_first = number % 2 == 0
        if restore_first:
            restore_seconds, raw_seconds = prompt.restore(), prompt.raw_read()
        else:
            raw_seconds, restore_seconds = prompt.raw_read(), prompt.restore()
        rounds.append(Round(restore_seconds=restore_seconds, raw_seconds=raw_seconds, restore_first=restore_first))
        advance()
    return Throughput(
        world_size=settings.world_size,
        num_bytes=settings.num_pages * settings.page_bytes * settings.world_size,
        num_records=num_records,
        direct=group.direct,
        store_seconds=store_seconds,
        rounds=tuple(rounds),
    )
