"""Entry point of the ``flare`` command: the tree of subcommands, and errors as one clear message.

Importing it must stay cheap (``flare --help`` answers at once): only click and the subcommands' declarations.
"""

from __future__ import annotations

import sys

import click

from flare_cli import __version__
from flare_cli.commands.bench import bench
from flare_cli.commands.config import config
from flare_cli.commands.export import export
from flare_cli.commands.key import key
from flare_cli.commands.model import model
from flare_cli.commands.records import records
from flare_cli.commands.run import run
from flare_cli.commands.status import status
from flare_core.errors import FlareError

__all__ = ["flare", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="flare %(version)s")
def flare() -> None:
    """Serve language models on one or many ranks, with a prefix cache on every rank's own disk."""


for command in (run, config, export, model, key, records, bench, status):
    flare.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: 0, 2 for a usage error, 78 for ranks that disagree, 70 for a lost group."""
    try:
        code = flare.main(args=arguments, prog_name="flare", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.exceptions.Abort:
        sys.exit(130)
    except FlareError as error:
        click.echo(f"flare: {error}", err=True)
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
