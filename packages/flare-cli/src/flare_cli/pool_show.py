"""``flare pool status|ls|verify|gc``: asks a manager and prints what it says. Loads no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from flare_cache.pool.admin_client import AdminClient, connect_admin
from flare_cache.pool.admin_messages import (
    Collect,
    Collected,
    ListRecords,
    ManagerStatus,
    RecordLine,
    RecordLines,
    Status,
    Verified,
    Verify,
)
from flare_cache.pool.client import PoolRefused, PoolUnavailable
from flare_cache.pool.url import parse_pool_url
from flare_cli.salt import load_cluster_key
from flare_cli.units import format_duration, format_size
from flare_core.errors import FlareError
from flare_transport import Address, Security

__all__ = ["collect", "list_records", "show_status", "verify_pool"]

_SHOWN = 16
_LINES, _VERIFIED = 1000, 4
_INSTANCES_SHOWN = 64


def connect(url: str, key_file: str) -> AdminClient:
    """The first manager of ``url`` that answers. Raises UsageError and FlareError."""
    parsed = parse_pool_url(url)
    key = load_cluster_key(Path(key_file))
    security = Security.TLS if parsed.is_tls else Security.PLAINTEXT
    problems: list[str] = []
    for host, port in parsed.places:
        try:
            return connect_admin(Address(host, port), key=key, security=security)
        except PoolUnavailable as error:
            problems.append(str(error))
        except PoolRefused as error:
            raise FlareError(str(error)) from error
    msg = f"no manager answers: {'; '.join(problems)}"
    raise FlareError(msg)


def show_status(url: str, key_file: str, *, as_json: bool) -> None:
    """Print how the manager stands."""
    with connect(url, key_file) as client:
        status = client.ask(Status())
    assert isinstance(status, ManagerStatus)  # noqa: S101 - the answer to this question
    if as_json:
        sys.stdout.write(msgspec.json.encode(status).decode() + "\n")
        return
    console = Console(highlight=False)
    limit = "no limit" if status.limit_bytes is None else f"at most {format_size(status.limit_bytes)}"
    quota = "" if status.quota_bytes is None else f", {format_size(status.quota_bytes)} a namespace"
    console.print(f"manager {status.name}, epoch {status.epoch[:8]}, up {format_duration(status.uptime_seconds)}")
    console.print(f"storage {status.storage}: {limit}{quota}")
    console.print(
        f"memory {format_size(status.memory_bytes)} of {format_size(status.memory_limit_bytes)}, "
        f"{status.memory_hits} hits, {status.memory_misses} misses"
    )
    console.print(
        f"sent {format_size(status.num_bytes_sent)}, received {format_size(status.num_bytes_received)}, "
        f"{status.num_transfers} transfers open, {status.num_evicted} evicted, {status.num_condemned} found bad"
    )
    table = Table("namespace", "records", "size", "ranks connected")
    for one in status.namespaces:
        ranks = sorted(
            f"{session.instance} {session.rank}/{session.world_size}"
            for session in status.sessions
            if session.namespace == one.namespace
        )
        table.add_row(one.namespace[:_SHOWN], str(one.num_records), format_size(one.num_bytes),
                      "\n".join(ranks[:_INSTANCES_SHOWN]))  # fmt: skip
    console.print(table)


def list_records(url: str, key_file: str, *, as_json: bool) -> None:
    """Print the records."""
    with connect(url, key_file) as client:
        lines = _all_lines(client)
        if as_json:
            for line in lines:
                sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
            return
        table = Table(
            Column("record", no_wrap=True, min_width=_SHOWN),
            "extends",
            "tokens",
            "holds",
            "ranks",
            "size",
            "namespace",
            "put",
        )
        for line in lines:
            put = time.strftime("%Y-%m-%d %H:%M", time.localtime(line.created_at))
            table.add_row(
                line.key[:_SHOWN],
                line.parent[:_SHOWN] or "-",
                f"{line.start}-{line.end}",
                line.extent,
                str(line.num_ranks),
                format_size(line.num_bytes),
                line.namespace[:8],
                put,
            )
    Console(highlight=False).print(table)


def _all_lines(client: AdminClient) -> Iterator[RecordLine]:
    first = 0
    while True:
        reply = client.ask(ListRecords(first=first, count=_LINES))
        assert isinstance(reply, RecordLines)  # noqa: S101 - the answer to this question
        yield from reply.records
        first += len(reply.records)
        if not reply.records or first >= reply.total:
            return


def verify_pool(url: str, key_file: str, *, remove: bool) -> int:
    """Have every shard read and checked; 1 when a record is bad."""
    bad: list[tuple[str, str]] = []
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    first = num_records = num_bytes = 0
    with connect(url, key_file) as client, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        status = client.ask(Status())
        assert isinstance(status, ManagerStatus)  # noqa: S101 - the answer to this question
        task = progress.add_task("verifying", total=sum(one.num_bytes for one in status.namespaces))
        while True:
            reply = client.ask(Verify(first=first, count=_VERIFIED, remove=remove))
            assert isinstance(reply, Verified)  # noqa: S101 - the answer to this question
            bad += reply.bad
            num_records += reply.num_records
            num_bytes += reply.num_bytes
            progress.advance(task, reply.num_bytes)
            # What was removed moves the rest forward.
            first += reply.num_records - (len(reply.bad) if remove else 0)
            if not reply.num_records or first >= reply.total:
                break
    console = Console(highlight=False)
    for key, problem in bad:
        console.print(f"{key[:_SHOWN]}  {problem}{' (removed)' if remove else ''}")
    console.print(f"{num_records} records, {format_size(num_bytes)}, verified; {len(bad)} are bad")
    return 1 if bad else 0


def collect(url: str, key_file: str) -> None:
    """Have leftovers removed, and say what went."""
    with connect(url, key_file) as client:
        reply = client.ask(Collect())
    assert isinstance(reply, Collected)  # noqa: S101 - the answer to this question
    Console(highlight=False).print(
        f"removed {reply.num_objects} shards of no record, {format_size(reply.num_bytes)}; "
        f"{reply.num_young} are younger than the grace and were left"
    )
