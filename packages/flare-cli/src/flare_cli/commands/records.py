"""``flare records``: look into a record directory, check it, remove records; without torch and without a server."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["records"]

DIRECTORY = click.argument("directory", metavar="DIR")
KEY_HELP = "KEY is the beginning of a record's key, as listed."


@click.group()
def records() -> None:
    """Look into the record directory of one rank."""


@records.command("ls")
@DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="As JSON, one record a line.")
@click.option("--url", metavar="URL", help="Ask the running server there what the pool has of them.")
@click.option("--key-file", metavar="FILE", help="API or admin key, for servers on other hosts.")
def list_(directory: str, as_json: bool, url: str | None, key_file: str | None) -> int:
    """List the records in DIR, children below their parents."""
    from flare_cli.show_records import pool_states, print_listing

    states = None if url is None else pool_states(url, key_file)
    print_listing(Path(directory), as_json=as_json, pool=states)
    return 0


@records.command(epilog=KEY_HELP)
@DIRECTORY
@click.argument("key", metavar="KEY")
def show(directory: str, key: str) -> int:
    """Show what a record's header says."""
    from flare_cli.show_records import print_record

    print_record(Path(directory), key)
    return 0


@records.command(epilog=KEY_HELP)
@DIRECTORY
@click.argument("keys", metavar="[KEY]...", nargs=-1)
def verify(directory: str, keys: tuple[str, ...]) -> int:
    """Check every digest of the records in DIR, or of those named. Exits 1 when one is bad."""
    from flare_cli.show_records import verify_directory

    return verify_directory(Path(directory), keys)


@records.command(epilog=KEY_HELP)
@DIRECTORY
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(directory: str, keys: tuple[str, ...], yes: bool) -> int:
    """Remove records and all that extend them, while no server uses DIR.

    The other ranks drop the same records at the next start.
    """
    from flare_cli.show_records import remove

    if not yes:
        click.confirm(f"Remove {len(keys)} records and what extends them from {directory}?", abort=True, err=True)
    remove(Path(directory), keys)
    return 0
