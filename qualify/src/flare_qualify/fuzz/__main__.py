"""``python -m flare_qualify.fuzz [TARGET…]``: replays corpora and fuzzes, by coverage where atheris is installed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flare_qualify.fuzz.corpus import REPOSITORY_CORPUS, Corpus
from flare_qualify.fuzz.coverage_guided import fuzz_by_coverage, grow_corpus, has_atheris
from flare_qualify.fuzz.loop import FuzzResult, fuzz
from flare_qualify.fuzz.registry import TARGETS, chosen

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if anything was found, 2 for a mistake on the command line."""
    parser = argparse.ArgumentParser(prog="flare_qualify.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(target.name for target in TARGETS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target (10)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (1)")
    parser.add_argument("--engine", choices=["auto", "mutation", "atheris"], default="auto")
    parser.add_argument("--grow", action="store_true", help="by coverage, and add what was found to the corpus")
    parser.add_argument("--corpus", type=Path, default=REPOSITORY_CORPUS, help="directory of inputs and crashes")
    parser.add_argument("--json", type=Path, help="file for the summary")
    parser.add_argument("--input", type=Path, help="run this one input, for a crash's reproduction")
    settings = parser.parse_args(arguments)
    try:
        targets = chosen(settings.targets)
    except ValueError as error:
        print(f"flare_qualify.fuzz: {error}", file=sys.stderr)
        return 2
    if settings.input is not None:
        with targets[0].open() as execute:
            execute(settings.input.read_bytes())
        return 0
    engine = settings.engine
    if engine == "auto":
        engine = "atheris" if has_atheris() else "mutation"
    by_coverage = grow_corpus if settings.grow else fuzz_by_coverage
    run = by_coverage if engine == "atheris" or settings.grow else fuzz
    console = Console()
    results: list[FuzzResult] = []
    for target in targets:
        with console.status(f"{target.name}: {target.proves}"):
            results.append(run(target, seconds=settings.seconds, seed=settings.seed, corpus=Corpus(settings.corpus)))
        _print_crashes(console, results[-1])
    console.print(_table(results))
    if settings.json is not None:
        settings.json.parent.mkdir(parents=True, exist_ok=True)
        settings.json.write_text(json.dumps(_summary(results, settings.seed), indent=2) + "\n")
    return int(any(result.crashes for result in results))


def _print_crashes(console: Console, result: FuzzResult) -> None:
    for crash in result.crashes:
        console.print(f"[bold red]{result.target}[/] {crash.error}\n  kept in {crash.file}", highlight=False)
        console.print(crash.trace, highlight=False, markup=False, style="dim")


def _table(results: Sequence[FuzzResult]) -> Table:
    table = Table("target", "engine", "corpus", "executions", "per second", "found")
    for result in results:
        rate = f"{result.executions_per_second:,.0f}"
        counts = (str(result.corpus), f"{result.executions:,}", rate, str(len(result.crashes)))
        table.add_row(result.target, result.engine, *counts)
    return table


def _summary(results: Sequence[FuzzResult], seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "executions": sum(result.executions for result in results),
        "crashes": sum(len(result.crashes) for result in results),
        "targets": [
            asdict(result) | {"executions_per_second": round(result.executions_per_second, 1)} for result in results
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
