"""A record directory that is moved, replaced, linked elsewhere, removed or frozen while a rank serves from it."""

from __future__ import annotations

from collections.abc import Callable

from flare_qualify.fault_drill import Drill, open_drill
from flare_qualify.faults.directories import immutable, removed, replaced
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario

__all__ = ["SCENARIOS"]

_RANK = 1


def _replace(context: Context, drill: Drill, name: str, *, by_link: bool) -> None:
    """Stores and restores go on in the rank's own directory; nothing appears where its path leads now."""
    group = drill.group
    with replaced(group.record_directory(_RANK), by_link=by_link) as displaced:
        before = len(list(displaced.moved.glob("*.rec")))
        drill.ask_new(*(context.rng.randrange(1000, 1_000_000) for _ in range(2)))
        drill.answer_all(name, at_least=len(drill.prompts))
        strangers = displaced.strangers()
        context.check(not strangers, f"{name}: {strangers} were made outside the rank's directory")
        grown = len(list(displaced.moved.glob("*.rec"))) - before
        context.check(grown > 0, f"{name}: nothing was stored")
        context.fault_fired(name, f"{displaced.evidence}; {grown} records stored in the directory moved away")
        # Where a rank ends with its directory elsewhere, its lock and hint are the directory's all the same.
        codes = group.stop()
        context.check(codes == dict.fromkeys(codes, 0), f"{name}: exit codes {codes}")
        context.check(not displaced.strangers(), f"{name}: {displaced.strangers()} were made on the way out")
    drill.recover(name, at_least=len(drill.prompts))
    drill.reported.note(group)


def _freeze_directory(context: Context, drill: Drill, name: str) -> None:
    """No name can be made or removed on one rank: every store is taken back on the other, restores go on."""
    group = drill.group
    before = {rank: set(group.record_files(rank)) for rank in range(2)}
    with immutable(group.record_directory(_RANK)) as evidence:
        drill.ask_new(*(context.rng.randrange(1000, 1_000_000) for _ in range(2)))
        drill.answer_all(name, at_least=len(drill.prompts))
        reasons = drill.job_failures("store", _RANK)
        context.check(bool(reasons), f"{name}: no store failed")
        for rank in range(2):
            context.check(set(group.record_files(rank)) == before[rank], f"{name}: the files of rank {rank} changed")
        context.fault_fired(name, f"{evidence}; stores failed: {reasons}")
    drill.check_at_rest(name)
    context.check(set(group.stop().values()) == {0}, f"{name}: the group did not end in order")
    drill.recover(name, at_least=len(drill.prompts))


def _freeze_record(context: Context, drill: Drill, name: str) -> None:
    """A damaged record that cannot be removed: a miss all the same, on every rank, now and after a restart."""
    group = drill.group
    path = group.record_directory(_RANK) / drill.file_of(context.rng.choice(list(drill.prompts)))
    with path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes((byte[0] ^ 1,)))
    drill.reported.forget([path.name])
    with immutable(path) as evidence:
        answers = drill.answer_all(name, at_least=len(drill.prompts) - 1)
        missed = [each for each, answer in answers.items() if not answer.cached_tokens["disk"]]
        context.check(len(missed) == 1, f"{name}: {missed} were not restored, one was due")
        context.fault_fired(name, f"{evidence}; a bit flipped in it; not restored: {missed}")
        group.wait_stored()
        again = drill.answer_all(f"{name}, again", at_least=len(drill.prompts) - 1)
        context.check(again.keys() == answers.keys(), f"{name}: not all prompts were answered again")
        group.stop()
    drill.recover(name, at_least=len(drill.prompts) - 1)


def run_abuse(context: Context) -> None:
    """Each kind of abuse in turn; the group is stopped and started after each."""
    kinds: dict[str, Callable[[Context, Drill, str], None]] = {
        "replaced by a directory": lambda context, drill, name: _replace(context, drill, name, by_link=False),
        "replaced by a link": lambda context, drill, name: _replace(context, drill, name, by_link=True),
        "frozen": _freeze_directory,
        "damaged record frozen": _freeze_record,
    }
    group = context.group("oracle", 2)
    rounds = 10 if context.is_long else 1
    with open_drill(context, group) as drill:
        for case in context.cases(f"{kind}, {number}" for number in range(rounds) for kind in kinds):
            kinds[case.rpartition(",")[0]](context, drill, case)
            drill.reported.note(group)
        group.stop()


def run_removed(context: Context) -> None:
    """The directory is gone: stores fail and are taken back, restores miss; a new one is made only when allowed."""
    group = context.group("oracle", 2)
    with open_drill(context, group) as drill:
        evidence = removed(group.record_directory(_RANK))
        drill.ask_new(300, 301)
        answers = drill.answer_all("removed", restore=False)
        found = {name: answer.cached_tokens["disk"] for name, answer in answers.items()}
        context.check(not any(found.values()), f"restored without a directory: {found}")
        context.check(not group.record_directory(_RANK).exists(), "the directory was made again while serving")
        context.fault_fired("directory removed", f"{evidence}; nothing restored, nothing stored")
        group.stop()
        drill.reported.forget(list(drill.reported.names))
        group.rank_options = {rank: ["--prefix-cache-accept-loss"] for rank in range(2)}
        group.start()
        drill.answer_all("with a new directory", restore=False)
        drill.reported.note(group)
        drill.answer_all("with a new directory, again", at_least=len(drill.prompts))
        drill.check_at_rest("with a new directory")
        group.stop()


SCENARIOS = (
    Scenario(
        name="directory-abused",
        proves="A directory moved, linked or frozen under a rank leads no write elsewhere and costs no answer.",
        rows=("A5", "A13"),
        needs=("root",),
        seconds=16,
        long_seconds=240,
        run=run_abuse,
    ),
    Scenario(
        name="directory-removed",
        proves="A directory removed under a rank fails its stores and restores, and no request.",
        rows=("A5",),
        seconds=8,
        run=run_removed,
    ),
)
