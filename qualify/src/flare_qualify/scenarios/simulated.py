"""The deterministic simulator beside the real runs: seeds for a while, equal replays, and the bugs that it must catch.

What is injected and restored there is told as figures of its own: the counts of a run are those of real processes.
"""

from __future__ import annotations

import os
import time

from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario

__all__ = ["SCENARIOS"]

_STANDARD_SECONDS = 50.0
_BATCH = 100
_LONG_SEEDS, _LONG_BATCH = 100_000, 2_000
_HUNTS, _HUNT_SEEDS = 5, 5_000


def _run_batch(context: Context, start: int, count: int) -> None:
    from flare_qualify.sim.run import run_seeds

    summary = run_seeds(start, count, num_processes=os.cpu_count() or 1)
    for outcome in summary.violations[:5]:
        context.check(False, f"seed {outcome.seed}: {outcome.rule}: {outcome.detail}")
    context.check(not summary.violations, f"{len(summary.violations)} of {count} seeds from {start} on break a rule")
    faults = sum(number for name, number in summary.counts.items() if name.startswith("fault "))
    if not faults or not summary.counts.get("restored tokens"):
        context.vacuous(f"seeds from {start} on: {faults} faults, and tokens restored: {summary.counts}")
    context.figure("simulated_seeds", count)
    context.figure("simulated_events", summary.num_events)
    context.figure("simulated_faults", faults)
    context.history.append("simulated", start=start, count=count, rate=round(summary.schedules_per_minute))


def run_simulated_seeds(context: Context) -> None:
    """Seeds from one on that the run's seed chooses, until the time is up; in the long form 100,000 from zero on."""
    if context.is_long:
        for case in context.cases([str(start) for start in range(0, _LONG_SEEDS, _LONG_BATCH)]):
            _run_batch(context, int(case), _LONG_BATCH)
        return
    deadline = time.monotonic() + _STANDARD_SECONDS
    start = context.rng.randrange(10**9)
    while time.monotonic() < deadline:
        _run_batch(context, start, _BATCH)
        start += _BATCH


def run_replays(context: Context) -> None:
    """The same seed, run again, comes to the same digest of its whole log."""
    from flare_qualify.sim.options import expand
    from flare_qualify.sim.world import run_world

    first = context.rng.randrange(10**9)
    count = 200 if context.is_long else 20
    for seed in range(first, first + count):
        one, other = (run_world(expand(seed))[0] for _ in range(2))
        context.check(one.digest == other.digest, f"seed {seed}: {one.digest} and {other.digest}")
    context.figure("simulated_replays", count)


def run_planted_bugs(context: Context) -> None:
    """Each planted bug must be caught from five different places on; a case is a bug."""
    from flare_qualify.sim.planted import PLANTED_BUGS
    from flare_qualify.sim.run import bug_named, hunt

    for name in context.cases(bug.name for bug in PLANTED_BUGS):
        result = hunt(bug_named(name), max_seeds=_HUNT_SEEDS, num_hunts=_HUNTS)
        context.check(
            result.is_caught, f"{name} ({result.breaks}) was caught in {len(result.seeds_to_catch)} hunts only"
        )
        context.fault_fired(f"planted bug {name}", f"caught after {result.seeds_to_catch} seeds by {result.rules}")
        context.figure("planted_bugs_caught", result.is_caught)


SCENARIOS = (
    Scenario(
        name="simulated-seeds",
        proves="Whole groups over the real machines keep every rule under simulated faults, and recover when they end.",
        rows=("A4", "A5", "A6", "A11", "A13", "A15", "A16", "A17"),
        seconds=55,
        long_seconds=3600,
        faults_due=False,
        restores_due=False,
        alone=True,
        run=run_simulated_seeds,
    ),
    Scenario(
        name="simulated-replays",
        proves="A seed of the simulator replays to the same log, bit for bit.",
        seconds=10,
        long_seconds=60,
        faults_due=False,
        restores_due=False,
        run=run_replays,
    ),
    Scenario(
        name="planted-bugs",
        proves="The simulator's rules see bugs: each one that is planted in the real machines is caught.",
        suites=("long",),
        seconds=1200,
        restores_due=False,
        run=run_planted_bugs,
    ),
)
