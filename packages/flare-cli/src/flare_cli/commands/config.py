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

    Also the heads, MLP columns and vocabulary ids of every rank. Exits 2 where 'flare run' would refuse the settings,
    and says why.
    """
    from flare_cli.config import check_config
    from flare_cli.model_store import find_default_model
    from flare_cli.show_config import print_resolved, print_split

    resolved = resolve_from(arguments)
    print_resolved(resolved)
    model = resolved.config.model or find_default_model()
    if model is not None and resolved.config.world_size >= 1:
        print_split(str(model), resolved.config.world_size)
    check_config(resolved.config)
    return 0
