"""``flare bench``: measurements of this machine and of flare's parts on it."""

from __future__ import annotations

import click

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure flare's parts on this machine."""
