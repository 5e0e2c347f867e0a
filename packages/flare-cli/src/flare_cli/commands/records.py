"""``flare records``: look into a record directory, check it, remove records; without torch and without a server."""

from __future__ import annotations

import click

__all__ = ["records"]


@click.group()
def records() -> None:
    """Look into a rank's record directory (of a server that is not running, where it writes)."""
