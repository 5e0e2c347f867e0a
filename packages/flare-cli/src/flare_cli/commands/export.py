"""``flare export``: prepare a package that each rank reads only its own part of."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["export"]


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--world-size", metavar="N", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Convert the weights; default: as stored.")
@click.option("-o", "--output", metavar="DIR", required=True, help="Directory to make; must not exist.")
def export(*, model: str, world_size: int, dtype: str | None, output: str) -> int:
    """Write MODEL's weights as a package for N ranks, with digests; 'flare run' serves it like a model."""
    from flare_cli.startup_display import StartupDisplay
    from flare_cli.wiring import export_model

    display = StartupDisplay(as_json=False)
    try:
        export_model(Path(model), world_size=world_size, output=Path(output), dtype=dtype, report=display.stage)
    finally:
        display.close()
    click.echo(output)
    return 0
