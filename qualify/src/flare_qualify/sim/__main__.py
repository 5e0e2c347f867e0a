"""``python -m flare_qualify.sim``: run seeds, replay one, hunt planted bugs, shrink a failing seed."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flare_qualify.sim.options import Options, expand
from flare_qualify.sim.planted import PLANTED_BUGS
from flare_qualify.sim.run import BugResult, Summary, bug_named, differing_replays, hunt, run_seeds
from flare_qualify.sim.seed_file import SeedFile, read_seed_file, write_seed_file
from flare_qualify.sim.shrink import shrink
from flare_qualify.sim.world import Outcome, run_world

_console = Console(stderr=True)


@click.group()
def main() -> None:
    """Deterministic simulation of flare's record path and engine."""
    logging.disable(logging.CRITICAL)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=_console
    )


@main.command()
@click.option("--seeds", "count", default=1000, show_default=True, help="Seeds to run.")
@click.option("--start", default=0, show_default=True, help="The first.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--events", default=1000, show_default=True, help="Events under faults of each seed.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the summary there.")
def run(count: int, start: int, jobs: int, events: int, path: Path | None) -> None:
    """Run seeds; exit 1 when a rule was broken."""
    with _progress() as progress:
        task = progress.add_task("seeds", total=count)

        def told(outcome: Outcome) -> None:
            progress.advance(task)
            if outcome.rule:
                progress.console.print(f"[red]seed {outcome.seed}[/]: {outcome.rule}: {outcome.detail}")

        summary = run_seeds(start, count, num_processes=jobs, num_events=events, on_outcome=told)
    _show(summary)
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    sys.exit(1 if summary.violations else 0)


def _show(summary: Summary) -> None:
    _console.print(
        f"{summary.num_seeds} seeds, {summary.num_events} events, {summary.seconds:.1f} s on {summary.num_processes} "
        f"processes: {summary.schedules_per_minute:.0f} schedules of 1,000 events a minute and core; "
        f"{len(summary.violations)} violations"
    )
    for outcome in summary.violations[:1]:
        _console.print(f"the first is seed {outcome.seed}, with")
        _console.print(_described(expand(outcome.seed)))


def _described(options: Options) -> str:
    return msgspec.json.format(msgspec.json.encode(options), indent=2).decode()


@main.command()
@click.argument("what")
@click.option("--log", "num_lines", default=0, help="Show so many last lines of the log.")
@click.option("--events", default=1000, show_default=True, help="Events under faults, where a seed is given.")
def replay(what: str, num_lines: int, events: int) -> None:
    """Run one SEED, or a seed FILE with the bug that it names; exit 1 when a rule is broken."""
    file = SeedFile(options=expand(int(what), num_events=events)) if what.isdigit() else read_seed_file(Path(what))
    with bug_named(file.bug).plant() if file.bug else contextlib.nullcontext():
        outcome, world = run_world(file.options, keep_log=num_lines > 0)
    for line in (world.loop.kept or [])[-num_lines:]:
        click.echo(line)
    _console.print(_described(file.options))
    click.echo(f"{outcome.num_events} events, {outcome.virtual_seconds:.3f} virtual seconds, digest {outcome.digest}")
    if outcome.rule:
        click.echo(f"{outcome.rule}: {outcome.detail}\n{outcome.trace}")
    sys.exit(1 if outcome.rule else 0)


@main.command()
@click.option("--seeds", "count", default=200, show_default=True, help="Seeds to run twice.")
@click.option("--start", default=0, show_default=True, help="The first.")
def equal(count: int, start: int) -> None:
    """Run seeds twice; exit 1 when a log is not the same both times."""
    with _progress() as progress:
        task = progress.add_task("seeds, twice", total=count)
        found = differing_replays(start, count, on_seed=lambda _: progress.advance(task))
    _console.print(f"{count} seeds run twice, {len(found)} differ {found[:10] if found else ''}")
    sys.exit(1 if found else 0)


@main.command()
@click.argument("names", nargs=-1)
@click.option("--seeds", "max_seeds", default=5000, show_default=True, help="Seeds of one hunt.")
@click.option("--hunts", default=5, show_default=True, help="Hunts for each, from different seeds on.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results there.")
def planted(names: tuple[str, ...], max_seeds: int, hunts: int, path: Path | None) -> None:
    """Hunt planted bugs (all of them by default); exit 1 when one is not caught."""
    bugs = [bug_named(name) for name in names] or list(PLANTED_BUGS)
    results: list[BugResult] = []
    with _progress() as progress:
        task = progress.add_task("planted bugs", total=len(bugs))
        for bug in bugs:
            progress.update(task, description=bug.name)
            results.append(hunt(bug, max_seeds=max_seeds, num_hunts=hunts))
            progress.advance(task)
    table = Table("bug", "breaks", "caught", "median seeds", "by")
    for result in results:
        rules = ", ".join(sorted(result.rules))
        table.add_row(result.name, result.breaks, "yes" if result.is_caught else "NO", str(result.median), rules)
    _console.print(table)
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    sys.exit(0 if all(result.is_caught for result in results) else 1)


@main.command("shrink")
@click.argument("seed", type=int)
@click.option("--bug", "name", default="", help="Plant this bug.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the seed file there.")
def shrink_command(seed: int, name: str, output: Path | None) -> None:
    """Make a failing SEED smaller, and write it to a file."""
    options = expand(seed)
    planting: Callable[[], contextlib.AbstractContextManager[None]] = (
        bug_named(name).plant if name else contextlib.nullcontext
    )
    with planting():
        outcome, _ = run_world(options)
        if not outcome.rule:
            raise click.ClickException(f"seed {seed} breaks no rule")
        best = shrink(options, outcome.rule, on_step=_tell)
    content = SeedFile(options=best, bug=name, rule=outcome.rule, note=outcome.detail)
    path = output or Path(f"seed-{seed}.json")
    write_seed_file(path, content)
    _console.print(f"written to {path}")


def _tell(options: Options, outcome: Outcome) -> None:
    _console.print(
        f"{options.world_size} ranks, {len(options.faults)} kinds of faults, {options.num_events} events: "
        f"{outcome.rule}"
    )


if __name__ == "__main__":
    main()
