"""The ``qualify`` command: list scenarios, run them, report, and put any server on a local port under the test."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from flare_qualify.client import ServerError
from flare_qualify.history import History, read_history
from flare_qualify.http_target import HttpTarget, describe_server
from flare_qualify.models import ModelLibrary
from flare_qualify.report import DAMAGE_WORDS, headline, write_report
from flare_qualify.run_context import Context
from flare_qualify.run_directory import REPORT_NAME, RESULT_NAME, RunDirectory, RunResult
from flare_qualify.runner import STYLES, RunSettings, run_scenarios
from flare_qualify.scenario import SUITES, all_scenarios, choose
from flare_qualify.verdict import Damage, Verdict, outcome_of

__all__ = ["main", "qualify"]

DEFAULT_DIRECTORY = Path("build/qualification")

_directory_option = click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Where the run's histories, qualification.json and report.html lie.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def qualify() -> None:
    """Inject faults into groups of flare ranks for real, and publish what they survived."""


@qualify.command("ls")
@click.option("--suite", type=click.Choice(SUITES), help="Only this suite.")
def ls(suite: str | None) -> None:
    """List the scenarios: what each proves, how long it takes, and what is missing for it here."""
    table = Table(box=None, pad_edge=False)
    for column in ("scenario", "rows", "suites", "seconds", "proves"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    chosen = [each for each in all_scenarios().values() if suite is None or suite in each.suites]
    for scenario in chosen:
        missing = scenario.missing()
        proves = scenario.proves + (f" [yellow](skipped: {missing})[/]" if missing else "")
        seconds = f"{scenario.seconds:g}" + (f" / {scenario.long_seconds:g}" if scenario.long_seconds else "")
        table.add_row(scenario.name, " ".join(scenario.rows), " ".join(scenario.suites), seconds, proves)
    console = Console()
    console.print(table)
    for name in SUITES:
        of_suite = [scenario for scenario in chosen if name in scenario.suites]
        minutes = sum(scenario.expected_seconds(name) for scenario in of_suite) / 60
        console.print(
            f"{name}: {len(of_suite)} scenarios, about {minutes:.0f} minutes one after the other", style="dim"
        )


@qualify.command("run")
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option("--suite", type=click.Choice(SUITES), default=SUITES[0], show_default=True, help="How much to do.")
@click.option("--resume", is_flag=True, help="Go on with the run in the directory: what passed is not run again.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Scenarios beside each other.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of everything drawn by chance.")
@click.option("--keep", is_flag=True, help="Keep the files of scenarios that passed.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help=f"As for report; default: {DEFAULT_DIRECTORY}, and {DEFAULT_DIRECTORY}-long for the long suite.",
)
@click.pass_context
def run(context: click.Context, /, names: tuple[str, ...], directory: Path | None, **options: Any) -> None:
    """Run the scenarios called NAME, or the whole suite; exit code 1 when any of them does not pass."""
    known = all_scenarios()
    console = Console()
    is_standard = options["suite"] == SUITES[0]
    where = RunDirectory(directory or DEFAULT_DIRECTORY.with_name(DEFAULT_DIRECTORY.name + "-long" * (not is_standard)))
    settings = RunSettings(directory=where, **options)
    try:
        chosen = choose(known, names, settings.suite)
    except KeyError as error:
        raise click.UsageError(f"no scenario is called {error.args[0]}; 'qualify ls' lists them") from None
    # Told to end as by Ctrl-C, so that scenarios take their mounts, namespaces and processes away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = run_scenarios(chosen, settings, console)
    except FileExistsError as error:
        raise click.UsageError(str(error)) from None
    except BlockingIOError:
        raise click.UsageError(f"another run is at work in {where.root}; choose another --directory") from None
    except KeyboardInterrupt:
        console.print(f"cut off; go on with: qualify run --resume --suite {settings.suite} --directory {where.root}")
        context.exit(130)
    _print_result(console, result, where)
    context.exit(0 if result.is_good else 1)


@qualify.command("report")
@_directory_option
@click.pass_context
def report(context: click.Context, directory: Path) -> None:
    """Write qualification.json and report.html anew from the histories, and print the counts."""
    where = RunDirectory(directory)
    if not where.own.path.exists():
        raise click.UsageError(f"{directory} holds no run; make one with 'qualify run'")
    result = where.result(list(all_scenarios().values()))
    where.write_result(result)
    write_report(where, result)
    _print_result(Console(), result, where)
    context.exit(0 if result.is_good else 1)


@qualify.command("http")
@click.argument("url")
@click.option("--model", help="Its name; default: the first that the server lists.")
@click.option("--prompt-words", type=click.IntRange(1), default=400, show_default=True, help="Length of the prompts.")
@click.option("--tolerance", type=float, default=0.0, show_default=True, help="Total variation between equal prompts.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path("build/qualification-http"),
    show_default=True,
    help="Where the history lies.",
)
@click.pass_context
def http(context: click.Context, /, url: str, model: str | None, directory: Path, seed: int, **options: Any) -> None:
    """Put the OpenAI-compatible server at URL (http://127.0.0.1:8000) under what needs no access to its machine."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        server = describe_server(url)
    except (OSError, ServerError, KeyError, IndexError, ValueError) as error:
        raise click.UsageError(f"{url} does not answer as an OpenAI-compatible server: {error}") from None
    server = server if model is None else dataclasses.replace(server, model=model)
    directory.mkdir(parents=True, exist_ok=True)
    history = History(directory / f"http-{time.strftime('%Y%m%dT%H%M%S')}.jsonl")
    history.append("begin", scenario="http", url=url, model=server.model, seed=seed)
    drive = Context("http", "standard", directory, seed, history, ModelLibrary(directory / "models"))
    # Prompts that no earlier run has left in the server's cache.
    drive.rng.seed(f"{seed}/{time.time_ns()}")
    findings = HttpTarget(drive, url, server, **options).run()
    history.append("end")
    table = Table(title=f"{server.model} at {url}", title_justify="left", show_header=False)
    for finding in findings:
        mark = {True: "[green]good[/]", False: "[bold red]bad[/]", None: "[dim]fact[/]"}[finding.is_good]
        table.add_row(mark, finding.what, finding.detail)
    console = Console()
    console.print(table)
    outcome = outcome_of(read_history(history.path), faults_due=False, restores_due=False)
    console.print(f"[{STYLES[outcome.verdict]}]{outcome.verdict}[/]  {history.path}", highlight=False)
    context.exit(0 if outcome.verdict is Verdict.PASS else 1)


def _print_result(console: Console, result: RunResult, directory: RunDirectory) -> None:
    table = Table(title="Qualification", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    total = result.total
    table.add_row("faults injected", f"{total.faults:,}")
    for what in Damage:
        count = total.damage[what]
        table.add_row(DAMAGE_WORDS[what], f"[{'bold red' if count else 'green'}]{count:,}[/]")
    for verdict in Verdict:
        count = result.count(verdict)
        if count or verdict is Verdict.PASS:
            table.add_row(f"scenarios: {verdict}", f"[{STYLES[verdict]}]{count}[/]")
    table.add_row("restore hits", f"{total.restores:,}")
    table.add_row("requests", f"{total.requests:,}")
    for name, number in sorted(total.figures.items()):
        table.add_row(name.replace("_", " "), f"{number:,}")
    console.print(table)
    console.print(headline(result), highlight=False, soft_wrap=True)
    console.print(
        f"{directory.root / RESULT_NAME}, {directory.root / REPORT_NAME}", style="dim", highlight=False, soft_wrap=True
    )


def main() -> None:
    """Entry point of the console script."""
    sys.exit(qualify(prog_name="qualify"))


if __name__ == "__main__":
    main()
