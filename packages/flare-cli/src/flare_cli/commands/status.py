"""``flare status``: what a running server says of its cluster."""

from __future__ import annotations

import click

__all__ = ["status"]


@click.command()
@click.option("--url", metavar="URL", default="http://127.0.0.1:8000", show_default=True, help="Server to ask.")
@click.option("--json", "as_json", is_flag=True, help="The snapshot as JSON.")
@click.option("--key-file", metavar="FILE", help="API or admin key, for servers on other hosts.")
def status(url: str, as_json: bool, key_file: str | None) -> int:
    """Show ranks, requests, pages and cache tiers of a running server."""
    from flare_cli.status import fetch_snapshot, print_snapshot

    snapshot, text = fetch_snapshot(url, key_file)
    if as_json:
        click.echo(text)
    else:
        print_snapshot(snapshot)
    return 0 if snapshot.state == "ready" else 1
