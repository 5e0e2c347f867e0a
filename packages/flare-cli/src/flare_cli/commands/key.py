"""``flare key``: a new cluster key on standard output."""

from __future__ import annotations

import sys

import click

__all__ = ["key"]


@click.command()
def key() -> None:
    """Print a new cluster key: flare key > cluster.key

    Copy the file to every host; it is the root of trust between ranks. A file on standard output is made readable by
    its owner only.
    """
    from flare_transport.keys import write_key

    write_key(sys.stdout)
