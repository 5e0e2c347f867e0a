"""Runs many seeds, on some processes, and sums up what came of them. Imported by the suites and the command line."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import msgspec

from flare_qualify.sim.options import expand
from flare_qualify.sim.planted import PLANTED_BUGS, PlantedBug
from flare_qualify.sim.world import Outcome, run_world

__all__ = ["BugResult", "Summary", "bug_named", "differing_replays", "hunt", "iterate_seeds", "run_seeds"]

_CHUNK_SEEDS = 25


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of seeds came to.

    Attributes:
        start, num_seeds, num_events: what was run.
        seconds, cpu_seconds: of the wall clock, and of processor time; ``num_processes`` ran beside each other.
        schedules_per_minute: of a thousand events, on one core.
        violations: worlds in which a rule was broken.
        counts: what happened in all of them.
    """

    start: int
    num_seeds: int
    num_events: int
    seconds: float
    cpu_seconds: float
    num_processes: int
    schedules_per_minute: float
    violations: list[Outcome]
    counts: dict[str, int]


class BugResult(msgspec.Struct, frozen=True, kw_only=True):
    """One planted bug: the first seeds of each of several ranges that show it, and by which rule."""

    name: str
    breaks: str
    is_caught: bool
    seeds_to_catch: list[int]
    rules: dict[str, int]

    @property
    def median(self) -> int | None:
        """Median number of seeds until it shows."""
        found = sorted(self.seeds_to_catch)
        return found[len(found) // 2] if found else None


def _run_chunk(seeds: range, num_events: int) -> tuple[list[Outcome], float]:
    """Outcomes, and seconds of this process's time."""
    logging.disable(logging.CRITICAL)
    began = time.process_time()
    # A world is some hundred thousand objects that go together: collecting in between only costs time.
    gc.disable()
    try:
        outcomes = [run_world(expand(seed, num_events=num_events))[0] for seed in seeds]
    finally:
        gc.enable()
        gc.collect()
    return outcomes, time.process_time() - began


def iterate_seeds(
    seeds: range, *, num_processes: int = 1, num_events: int = 1000
) -> Iterator[tuple[list[Outcome], float]]:
    """Outcomes of some seeds at a time, in order, and the seconds of processor time that they took."""
    chunks = [seeds[at : at + _CHUNK_SEEDS] for at in range(0, len(seeds), _CHUNK_SEEDS)]
    if num_processes == 1:
        for chunk in chunks:
            yield _run_chunk(chunk, num_events)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        yield from pool.map(_run_chunk, chunks, [num_events] * len(chunks))


def run_seeds(
    start: int,
    count: int,
    *,
    num_processes: int = 1,
    num_events: int = 1000,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Summary:
    """Run ``count`` seeds from ``start`` on; ``on_outcome`` is told each, in order. Blocks for some 0.1 s a seed."""
    began = time.monotonic()
    violations: list[Outcome] = []
    counts: Counter[str] = Counter()
    total = 0
    cpu_seconds = 0.0
    for outcomes, seconds in iterate_seeds(
        range(start, start + count), num_processes=num_processes, num_events=num_events
    ):
        cpu_seconds += seconds
        for outcome in outcomes:
            total += outcome.num_events
            counts.update(outcome.counts)
            if outcome.rule:
                violations.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
    return Summary(
        start=start,
        num_seeds=count,
        num_events=total,
        seconds=time.monotonic() - began,
        cpu_seconds=cpu_seconds,
        num_processes=num_processes,
        schedules_per_minute=total / 1000 / (cpu_seconds or 1.0) * 60,
        violations=violations,
        counts=dict(sorted(counts.items())),
    )


def differing_replays(start: int, count: int, *, on_seed: Callable[[int], None] | None = None) -> list[int]:
    """Seeds that do not give the same outcome and log digest when they are run a second time."""
    found: list[int] = []
    for seed in range(start, start + count):
        options = expand(seed)
        if run_world(options)[0] != run_world(options)[0]:
            found.append(seed)
        if on_seed is not None:
            on_seed(seed)
    return found


def hunt(bug: PlantedBug, *, start: int = 0, max_seeds: int = 5000, num_hunts: int = 5) -> BugResult:
    """Look for a planted bug from several places on, each time until a seed shows it or ``max_seeds`` have not."""
    found: list[int] = []
    rules: Counter[str] = Counter()
    with bug.plant():
        for number in range(num_hunts):
            first = start + number * max_seeds
            outcome, num_tried = _first_violation(range(first, first + max_seeds))
            if outcome is None:
                break
            found.append(num_tried)
            rules[outcome.rule] += 1
    return BugResult(
        name=bug.name,
        breaks=bug.breaks,
        is_caught=len(found) == num_hunts,
        seeds_to_catch=found,
        rules=dict(rules),
    )


def _first_violation(seeds: Iterable[int]) -> tuple[Outcome | None, int]:
    logging.disable(logging.CRITICAL)
    num_tried = 0
    for num_tried, seed in enumerate(seeds, 1):
        outcome, _ = run_world(expand(seed))
        if outcome.rule:
            return outcome, num_tried
    return None, num_tried


def bug_named(name: str) -> PlantedBug:
    """The planted bug of that name. Raises KeyError."""
    return {bug.name: bug for bug in PLANTED_BUGS}[name]
