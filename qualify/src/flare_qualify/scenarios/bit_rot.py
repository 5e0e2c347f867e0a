"""Record files damaged at rest in every way there is: each is a miss, no answer changes, other ranks follow.

Every kind of damage hits the record of a prompt of its own, on a rank drawn by chance, so that one restart judges all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flare_qualify.fault_drill import Drill, open_drill
from flare_qualify.faults.corruption import (
    DAMAGES,
    Consequence,
    damage_file,
    make_foreign_names,
    overwrite,
    read_record,
    swap_first_pages,
)
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.prompts import prompt_of

__all__ = ["SCENARIOS"]

_HINT = "join.idx"
_IN_SECTIONS = {"page", "tail", "row", "table-resealed", "zero-sector", "swapped-pages"}
"""Kinds of damage that are found only where the section that they hit is read."""


@dataclass(frozen=True, slots=True)
class _Hit:
    """What was done to the record of one prompt."""

    kind: str
    rank: int
    file: str
    what: str
    consequence: Consequence


def _damage_all(context: Context, drill: Drill, names: dict[str, str]) -> list[_Hit]:
    """One kind of damage for each prompt, on a rank drawn by chance."""
    group, hits = drill.group, []
    only = {name: len(drill.files_of(name)) == 1 for name in names}
    for kind, name in zip(DAMAGES, drill.prompts, strict=True):
        rank = context.rng.randrange(group.world_size)
        path = group.record_directory(rank) / names[name]
        is_end_read = read_record(path).header.identity.end == len(drill.prompts[name]) - 1
        damaged = damage_file(path, DAMAGES[kind], context.rng)
        if damaged is not None:
            # The prompt may have been stored twice; and what goes on to its answer's end has sections it does not need.
            is_read = only[name] and (is_end_read or kind not in _IN_SECTIONS)
            consequence = damaged.consequence if is_read else Consequence.HARMLESS
            hits.append(_Hit(kind, rank, path.name, damaged.what, consequence))
    return hits


def run_rot(context: Context, *, model: str, world_size: int) -> None:
    """All kinds of damage at once, then a start that opens every header, and one that trusts its hint."""
    group = context.group(model, world_size)
    with open_drill(context, group, model=model, num_prompts=len(DAMAGES)) as drill:
        rounds = 12 if context.is_long else 1
        ways = ("headers read", "hint trusted") if context.is_long or world_size == 2 else ("hint trusted",)
        for case in context.cases(f"{how}, {number}" for number in range(rounds) for how in ways):
            _rot(context, drill, case)
        group.stop()


def _rot(context: Context, drill: Drill, case: str) -> None:
    group, trusts_hint = drill.group, case.startswith("hint")
    group.stop()
    names = {name: drill.file_of(name) for name in drill.prompts}
    hits = _damage_all(context, drill, names)
    for rank in range(group.world_size):
        if not trusts_hint:
            (group.record_directory(rank) / _HINT).unlink(missing_ok=True)
    context.require(bool(hits), "nothing was damaged")
    group.start()
    for hit in hits:
        _check_join(context, drill, hit, case, trusts_hint=trusts_hint)
    answers = drill.answer_all(case, at_least=1)
    group.wait_stored()
    by_file = {names[name]: answers[name] for name in drill.prompts}
    for hit in hits:
        cached = by_file[hit.file].cached_tokens["disk"]
        is_whole = cached == len(prompt_of(0)) - 1
        # A record that was shortened may still be continued by the first page of one that extends it.
        if hit.consequence not in {Consequence.HARMLESS, Consequence.SHORTENED}:
            context.check(not is_whole, f"{case}: {hit.kind} ({hit.what}) on rank {hit.rank} was restored whole")
        evidence = f"{hit.what} on rank {hit.rank}: {cached} tokens restored"
        context.fault_fired(f"{hit.kind}, {case}", evidence)
    _restore_damaged(drill, names, case)


def _check_join(context: Context, drill: Drill, hit: _Hit, case: str, *, trusts_hint: bool) -> None:
    """What the join itself must have done with a file that it has opened."""
    path = drill.group.record_directory(hit.rank) / hit.file
    if hit.consequence is Consequence.LEFT_ALONE:
        context.check(path.exists(), f"{case}: {hit.kind} on rank {hit.rank} was not left alone")
    if hit.consequence is Consequence.REMOVED_AT_JOIN and not trusts_hint:
        for rank in range(drill.group.world_size):
            found = (drill.group.record_directory(rank) / hit.file).exists()
            context.check(not found, f"{case}: {hit.kind} ({hit.what}) on rank {hit.rank} is still on rank {rank}")


def _restore_damaged(drill: Drill, names: dict[str, str], case: str) -> None:
    """Make every record anew, so that the next round begins whole: nothing is stored once digests were found wrong."""
    group = drill.group
    group.stop()
    for rank in range(group.world_size):
        for name in names.values():
            (group.record_directory(rank) / name).unlink(missing_ok=True)
    group.rank_options = {rank: ["--prefix-cache-accept-loss"] for rank in range(group.world_size)}
    group.start()
    drill.answer_all(case, restore=False)
    drill.check_at_rest(case)


def run_misplaced(context: Context) -> None:
    """Sound bytes in the wrong place: pages of another record or rank, another rank's file, another record's."""
    group = context.group("oracle", 2)
    with open_drill(context, group, num_prompts=6) as drill:
        names = [drill.file_of(name) for name in drill.prompts]
        group.stop()
        one, other = group.record_directory(0), group.record_directory(1)
        deeds: dict[str, Callable[[], str]] = {
            "pages of another record": lambda: swap_first_pages(one / names[0], one / names[1]),
            "pages of another rank": lambda: swap_first_pages(one / names[2], other / names[2]),
            "another rank's file": lambda: _put(one / names[3], other / names[3]),
            "another record's file": lambda: _put(other / names[4], other / names[5]),
        }
        done = {name: deed() for name, deed in deeds.items()}
        for directory in (one, other):
            (directory / _HINT).unlink(missing_ok=True)
        group.start()
        answers = drill.answer_all("misplaced", at_least=1)
        restored = [answer.cached_tokens["disk"] for answer in answers.values()]
        context.check(restored[4] > 0, "the record whose bytes were copied was not restored")
        for number in (0, 1, 2, 3, 5):
            context.check(not restored[number], f"prompt {number} was restored from bytes in the wrong place")
        for name, what in done.items():
            context.fault_fired(name, f"{what}; tokens restored by prompt: {restored}")
        group.stop()


def _put(source: Path, target: Path) -> str:
    """The bytes of one record's file in the place of another's."""
    overwrite(target, source.read_bytes())
    return f"{target.parent.name}/{target.name[:8]} holds the bytes of {source.parent.name}/{source.name[:8]}"


def run_foreign(context: Context) -> None:
    """Names that are not flare's, or nearly: never touched, by start, stores, eviction or end."""
    group = context.group("oracle", 2, "--prefix-cache-disk-limit", "400K")
    with open_drill(context, group) as drill:
        group.stop()
        made = {rank: make_foreign_names(group.record_directory(rank)) for rank in range(2)}
        group.start()
        drill.answer_all("foreign names", at_least=1)
        drill.ask_new(*range(400, 410))
        group.stop()
        for rank, names in made.items():
            directory = group.record_directory(rank)
            found = {path.name: path.lstat().st_ino for path in directory.iterdir() if path.name in names}
            context.check(found == names, f"rank {rank}: {sorted(names.keys() - found.keys())} are gone")
            context.fault_fired("foreign names", f"rank {rank}: {len(found)} of {len(names)} are as they were")
        group.start()
        drill.ask_new(411)
        group.stop()


def _rotten(model: str, world_size: int, seconds: float) -> Scenario:
    return Scenario(
        name=f"bit-rot-{model}-tp{world_size}",
        proves="Every kind of damage to a record file is a miss with unchanged answers; the file leaves every rank.",
        rows=("A6", "A13", "A16"),
        seconds=seconds,
        long_seconds=200,
        run=partial(run_rot, model=model, world_size=world_size),
    )


SCENARIOS = (
    _rotten("oracle", 2, 20),
    _rotten("oracle-rows", 3, 14),
    Scenario(
        name="bytes-in-the-wrong-place",
        proves="Sound pages and files of another record or rank are found out, at the join or when they are read.",
        rows=("A6", "A10", "A13"),
        seconds=6,
        run=run_misplaced,
    ),
    Scenario(
        name="foreign-names",
        proves="Names in a record directory that are not flare's are never touched.",
        rows=("A6",),
        seconds=10,
        run=run_foreign,
    ),
)
