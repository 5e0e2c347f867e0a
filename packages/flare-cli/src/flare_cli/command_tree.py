"""The tree of subcommands. Only their declarations: what a command needs, it imports when it runs."""

from __future__ import annotations

import click

from flare_cli import __version__
from flare_cli.commands.bench import bench
from flare_cli.commands.config import config
from flare_cli.commands.export import export
from flare_cli.commands.key import key
from flare_cli.commands.model import model
from flare_cli.commands.pool import pool
from flare_cli.commands.records import records
from flare_cli.commands.run import run
from flare_cli.commands.spec import spec
from flare_cli.commands.status import status

__all__ = ["flare"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="flare %(version)s")
def flare() -> None:
    """Serve language models on one or many ranks, with a prefix cache on every rank's own disk."""


for command in (run, config, export, model, key, records, pool, bench, spec, status):
    flare.add_command(command)
