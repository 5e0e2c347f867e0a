"""``flare pool flush``: wait until a server's records are in the pool."""

from __future__ import annotations

import click

__all__ = ["flush"]


@click.command()
@click.option("--url", metavar="URL", default="http://127.0.0.1:8000", show_default=True, help="Server to wait for.")
@click.option("--key-file", metavar="FILE", help="API or admin key, for servers on other hosts.")
@click.option("--timeout", metavar="TIME", default="5m", show_default=True, help="Give up after so long.")
def flush(url: str, key_file: str | None, timeout: str) -> int:
    """Wait until a running server has put its pending records into the pool."""
    from flare_cli.pool_flush import wait_for_flush
    from flare_cli.units import parse_duration

    pool = wait_for_flush(url, key_file, timeout_seconds=parse_duration(timeout))
    dropped = sum(pool.dropped.values())
    click.echo(
        f"{pool.records_in_pool} records are in the pool, none is pending, {dropped} were dropped since the start"
    )
    return 0
