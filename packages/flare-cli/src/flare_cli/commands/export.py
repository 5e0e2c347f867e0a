"""``flare export``: prepare a package that each rank reads only its own part of."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["export"]


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--world-size", metavar="N", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("-o", "--output", metavar="DIR", required=True, help="Directory to make; must not exist.")
def export(model: str, world_size: int, output: str) -> int:
    """Write MODEL's weights as a package for N ranks, with digests; 'flare run' serves it like a model."""
    from flare_cli.wiring import export_model

    export_model(Path(model), world_size=world_size, output=Path(output))
    click.echo(output)
    return 0
