"""Fetches the snapshot of a running server and prints it for people. Standard library HTTP; knows no engine."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from flare_core.errors import FlareError, UsageError
from rich.console import Console
from rich.table import Table

from flare_cli.snapshot import ClusterSnapshot
from flare_cli.units import format_duration, format_size

__all__ = ["fetch_snapshot", "print_snapshot"]

TIMEOUT_SECONDS = 5.0


def fetch_snapshot(url: str, key_file: str | None) -> tuple[ClusterSnapshot, str]:
    """The snapshot, and its JSON as sent. Blocks up to 5 s.

    Raises:
        UsageError: not an http URL, or an unreadable key file. FlareError: nobody answers, or not with a snapshot.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        msg = f"--url {url}: expected http://HOST:PORT"
        raise UsageError(msg)
    headers = {}
    if key_file is not None:
        try:
            headers["Authorization"] = f"Bearer {Path(key_file).read_text(encoding='utf-8').strip()}"
        except (OSError, UnicodeDecodeError) as error:
            msg = f"--key-file {key_file}: {error}"
            raise UsageError(msg) from None
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/v1/cluster", headers=headers)
        response = connection.getresponse()
        data = response.read(16 << 20)
    except (OSError, http.client.HTTPException) as error:
        msg = f"no flare server answers at {url}: {error}"
        raise FlareError(msg) from None
    finally:
        connection.close()
    if response.status != 200:
        msg = f"{url} answered {response.status}: {data[:300].decode(errors='replace')}"
        raise FlareError(msg)
    try:
        return msgspec.json.decode(data, type=ClusterSnapshot), data.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        msg = f"{url} is no flare server: {error}"
        raise FlareError(msg) from None


def print_snapshot(snapshot: ClusterSnapshot) -> None:
    """Print the snapshot as a few tables on standard output."""
    console = Console()
    detail = f" ({snapshot.detail})" if snapshot.detail else ""
    console.print(
        f"[bold]{snapshot.model}[/] {snapshot.state}{detail}, up {format_duration(round(snapshot.uptime_seconds))}, "
        f"{snapshot.world_size} ranks, context {snapshot.max_model_len}",
        highlight=False,
    )
    requests, pages, tokens = snapshot.requests, snapshot.pages, snapshot.tokens
    console.print(
        f"requests: {requests.running} running, {requests.waiting} waiting, {requests.finished_total} finished, "
        f"{requests.cancelled_total} cancelled, {requests.failed_total} failed",
        highlight=False,
    )
    console.print(
        f"pages: {pages.free} free, {pages.held} held, {pages.cached} cached, {pages.quarantined} quarantined "
        f"of {pages.total}",
        highlight=False,
    )
    hits = ", ".join(f"{count} from {tier}" for tier, count in tokens.hit_total.items()) or "none restored"
    console.print(f"prompt tokens looked up: {tokens.lookup_total}, {hits}", highlight=False)
    if snapshot.tiers:
        table = Table("tier", "records", "used", "limit", "jobs", "failures")
        for tier in snapshot.tiers:
            jobs = " ".join(f"{op} {count}" for op, count in tier.jobs_total.items())
            failures = " ".join(f"{op} {count}" for op, count in tier.failures_total.items())
            used, limit = format_size(tier.used_bytes), format_size(tier.limit_bytes)
            table.add_row(tier.tier, str(tier.num_records), used, limit, jobs, failures)
        console.print(table)
    if snapshot.ranks:
        table = Table("rank", "host", "step", "silent", "records in")
        for rank in snapshot.ranks:
            table.add_row(str(rank.rank), rank.host, str(rank.step), f"{rank.silent_seconds:.1f} s", rank.directory)
        console.print(table)
