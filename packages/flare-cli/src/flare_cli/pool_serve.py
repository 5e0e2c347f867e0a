"""``flare pool serve``: one manager process, from its flags to its end. Part of the composition root; no torch."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import click

from flare_cache.pool.core_words import PoolLimits
from flare_cache.pool.local_storage import LocalStorage, open_local_storage
from flare_cache.pool.server import PoolServer, ServerSettings
from flare_cache.pool.storage import PoolStorage
from flare_cache.pool.url import parse_pool_url
from flare_cli.failpoints import arm_failpoints
from flare_cli.logs import set_up_logs
from flare_cli.startup_display import StartupDisplay
from flare_cli.units import format_size, parse_duration, parse_size
from flare_core.errors import UsageError
from flare_transport import Address, AddressError, KeyFileError, Security, load_key_file, parse_address

__all__ = ["serve_pool"]

_LOG = logging.getLogger("flare")
_MIN_GRACE_SECONDS = 150.0


def serve_pool(arguments: Mapping[str, str | bool | None]) -> int:
    """Run until a signal; the exit code.

    Raises:
        UsageError: a flag, the key file, the directory or the address cannot be used.
    """
    set_up_logs(as_json=bool(arguments["log_json"]), process="pool")
    arm_failpoints(os.environ)
    key = _load_key(str(arguments["key_file"]))
    address = _parse_listen(str(arguments["listen"]))
    limits = PoolLimits(
        limit_bytes=_size(arguments["limit"], "--limit"),
        quota_bytes=_size(arguments["quota"], "--quota"),
        grace_seconds=_grace(str(arguments["grace"])),
    )
    refresh_seconds = _duration(str(arguments["refresh"]), "--refresh")
    text = str(arguments["store"])
    storage, place, is_shared = _open_storage(text)
    security = Security.PLAINTEXT if arguments["plaintext"] else Security.TLS
    settings = ServerSettings(
        address=address,
        key=key,
        security=security,
        name=socket.gethostname(),
        place=place,
        limits=limits,
        memory_bytes=_size(arguments["memory"], "--memory") or 0,
        refresh_seconds=refresh_seconds if is_shared else None,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = PoolServer(settings, storage)
    try:
        _start(server, text)
        _announce(server, settings)
        stop.wait()
        click.echo("flare pool: ending", err=True)
        server.close()
    finally:
        if isinstance(storage, LocalStorage):
            storage.close()
    return 0


def _start(server: PoolServer, place: str) -> None:
    display = StartupDisplay(as_json=False)
    try:
        server.start(lambda num_done, total: display.stage("reading manifests", num_done, total))
    except AddressError as error:
        raise UsageError(f"--listen {server.settings.address}: {error}") from error
    except OSError as error:
        raise UsageError(f"--store {place} cannot be read: {error}") from error
    finally:
        display.close()


def _announce(server: PoolServer, settings: ServerSettings) -> None:
    scheme = "selenes" if settings.security is Security.TLS else "selene"
    where = parse_pool_url(f"{scheme}://{Address(settings.address.host, server.port)}")
    num_records = sum(len(index.manifests) for index in server.core.namespaces.values())
    size = format_size(server.core.num_bytes)
    click.echo(f"flare pool: {num_records} records, {size}, in {settings.place}; serving --pool {where}", err=True)
    if not where.is_tls and not where.is_loopback:
        _LOG.warning("prompts' KV travels unencrypted; leave --plaintext away beyond trusted networks")


def _load_key(path: str) -> bytes:
    try:
        return load_key_file(path)
    except KeyFileError as error:
        raise UsageError(str(error)) from error


def _parse_listen(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    try:
        if colon and port == "0":
            return Address(host.strip("[]"), 0)
        return parse_address(text)
    except AddressError as error:
        raise UsageError(f"--listen {text}: {error}") from error


def _size(value: str | bool | None, flag: str) -> int | None:
    if value is None:
        return None
    try:
        return parse_size(str(value))
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from error


def _duration(text: str, flag: str) -> float:
    try:
        return parse_duration(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from error


def _grace(text: str) -> float:
    seconds = _duration(text, "--grace")
    if seconds < _MIN_GRACE_SECONDS:
        msg = f"--grace {text}: shards must outlast transfers that read them: give {_MIN_GRACE_SECONDS:g}s or more"
        raise UsageError(msg)
    return seconds


def _open_storage(text: str) -> tuple[PoolStorage, str, bool]:
    """The storage, what to call it, and whether other managers may share it."""
    if "://" in text:
        from flare_cli.pool_bucket import open_bucket

        return open_bucket(text), text, True
    path = Path(text).expanduser()
    return open_local_storage(path), str(path), False
