"""``flare config``: every setting with where its value came from, and how a model divides over the ranks."""

from __future__ import annotations

from typing import Any

import click

from flare_cli.commands.options import resolve_from, run_options

__all__ = ["config"]


@click.command(short_help="Show every setting with its origin, and the split of a model.")
@run_options
def config(**arguments: Any) -> int:
    """Show what 'flare run' would use with the same flags, variables and file, and where each value came from.

    With a MODEL, also the heads, MLP columns and vocabulary ids of every rank.
    """
    from flare_cli.show_config import print_resolved, print_split

    resolved = resolve_from(arguments)
    print_resolved(resolved)
    if resolved.config.model is not None:
        print_split(resolved.config.model, resolved.config.world_size)
    return 0
