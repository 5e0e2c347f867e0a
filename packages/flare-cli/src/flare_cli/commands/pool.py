"""``flare pool``: the manager of a pool, and questions to it. Without torch."""

from __future__ import annotations

import click

from flare_cli.commands.pool_flush import flush

__all__ = ["pool"]

_URL = click.argument("url", metavar="URL")
_KEY = click.option("--key-file", metavar="FILE", required=True, help="The pool's key, made by 'flare key'.")
_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group()
def pool() -> None:
    """Share records between instances and hosts."""


pool.add_command(flush)


@pool.command()
@click.option("--listen", metavar="HOST:PORT", default="127.0.0.1:7420", show_default=True, help="Where ranks connect.")
@click.option(
    "--store",
    metavar="DIR|URL",
    required=True,
    help="A directory, or a bucket: s3://B/PREFIX, gs://…, az://…, file://….",
)
@_KEY
@click.option("--limit", metavar="SIZE", help="Bytes of all records; what was used longest ago goes.")
@click.option("--quota", metavar="SIZE", help="Bytes of one namespace (model, world size and salt key).")
@click.option("--memory", metavar="SIZE", default="1GiB", show_default=True, help="Shards kept in RAM in front of it.")
@click.option(
    "--refresh", metavar="TIME", default="2s", show_default=True, help="Look for what others put into a bucket."
)
@click.option("--grace", metavar="TIME", default="5m", show_default=True, help="Keep removed records' shards so long.")
@click.option("--plaintext", is_flag=True, help="Links without TLS (selene://): trusted networks, measurements.")
@click.option("--log-json", is_flag=True, help="Logs as JSON lines.")
def serve(**arguments: str | bool | None) -> int:
    """Serve a pool until SIGTERM or Ctrl-C.

    Ranks find it by --pool selenes://HOST:PORT (with --plaintext: selene://HOST:PORT) and the same key file.
    """
    from flare_cli.pool_serve import serve_pool

    return serve_pool(arguments)


@pool.command()
@_URL
@_KEY
@_JSON
def status(url: str, key_file: str, as_json: bool) -> int:
    """Show how the manager at URL stands: namespaces, sizes, limits, who is connected."""
    from flare_cli.pool_show import show_status

    show_status(url, key_file, as_json=as_json)
    return 0


@pool.command("ls")
@_URL
@_KEY
@_JSON
def list_(url: str, key_file: str, as_json: bool) -> int:
    """List the records of the pool, those used longest ago first."""
    from flare_cli.pool_show import list_records

    list_records(url, key_file, as_json=as_json)
    return 0


@pool.command()
@_URL
@_KEY
@click.option("--remove", is_flag=True, help="Remove records that are bad.")
def verify(url: str, key_file: str, remove: bool) -> int:
    """Read every shard and check every digest. Exits 1 when a record is bad."""
    from flare_cli.pool_show import verify_pool

    return verify_pool(url, key_file, remove=remove)


@pool.command()
@_URL
@_KEY
def gc(url: str, key_file: str) -> int:
    """Remove shards that belong to no record, left by ranks or managers that died."""
    from flare_cli.pool_show import collect

    collect(url, key_file)
    return 0
