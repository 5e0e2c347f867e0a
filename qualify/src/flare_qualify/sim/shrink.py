"""Makes a failing world smaller while it goes on failing by the same rule: fewer ranks, kinds of faults and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from flare_qualify.sim.options import Options
from flare_qualify.sim.world import Outcome, run_world

__all__ = ["shrink"]

_SMALLER: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("world_size", (2, 3, 4)),
    ("num_seeded", (0,)),
    ("memory_records", (0,)),
    ("num_threads", (1,)),
    ("lead", (0,)),
    ("max_outstanding", (1,)),
    ("max_sequences", (1, 2)),
    ("num_documents", (1,)),
    ("document_pages", (2, 3)),
    ("max_tokens", (1, 2)),
    ("max_sections", (1, 2)),
)


def shrink(
    options: Options, rule: str, *, max_runs: int = 300, on_step: Callable[[Options, Outcome], None] | None = None
) -> Options:
    """The smallest world found that breaks ``rule``; ``options`` does. Runs at most ``max_runs`` worlds."""
    best = options
    left = max_runs
    progressed = True
    while progressed and left > 0:
        progressed = False
        for candidate in _candidates(best):
            if left <= 0:
                break
            left -= 1
            outcome, _ = run_world(candidate)
            if outcome.rule == rule:
                best, progressed = _cut(candidate, outcome), True
                if on_step is not None:
                    on_step(best, outcome)
                break
    return best


def _cut(options: Options, outcome: Outcome) -> Options:
    """No more events than it took, if it failed while faults were injected."""
    return msgspec.structs.replace(options, num_events=min(options.num_events, outcome.num_events))


def _candidates(options: Options) -> Iterator[Options]:
    for kind in options.faults:
        kept = {other: weight for other, weight in options.faults.items() if other != kind}
        yield msgspec.structs.replace(options, faults=kept)
    for name, values in _SMALLER:
        for value in values:
            if value < getattr(options, name):
                yield msgspec.structs.replace(options, **{name: value})
    for name in ("has_rows", "is_uneven", "is_power_durable", "is_staged"):
        if getattr(options, name):
            yield msgspec.structs.replace(options, **{name: False})
    for share in (0.25, 0.5, 0.75, 0.9):
        num_events = int(options.num_events * share)
        if 10 < num_events < options.num_events:
            yield msgspec.structs.replace(options, num_events=num_events)
