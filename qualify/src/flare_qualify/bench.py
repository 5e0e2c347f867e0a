"""``make bench``: every benchmark one after the other, each in a process of its own, figures in ``build/bench``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

__all__ = ["main"]

BENCHMARKS = {
    "engine": ["flare_qualify.bench_engine", "--json"],
    "batching": ["flare_qualify.bench_batching", "--json"],
    "ranks": ["flare_qualify.bench_ranks", "--json"],
    "cache": ["flare_cli", "bench", "cache", "--job-latency", "--json"],
    "planning": ["flare_qualify.bench_cache_planning"],
}
"""Module and arguments by name; where the last is ``--json``, the file of the figures follows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks named, or all; the number of those that failed."""
    parser = argparse.ArgumentParser(prog="flare_qualify.bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="where the figures go")
    settings = parser.parse_args(arguments)
    settings.directory.mkdir(parents=True, exist_ok=True)
    console = Console()
    failed = 0
    for name in settings.names or BENCHMARKS:
        command = [sys.executable, "-m", *BENCHMARKS[name]]
        if command[-1] == "--json":
            command.append(str(settings.directory / f"{name}.json"))
        console.rule(name)
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
