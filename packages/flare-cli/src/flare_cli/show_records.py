"""Prints what ``flare_cache.inspect`` finds in a record directory. Loads no torch and needs no server."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from flare_cache.inspect import (
    Listing,
    RecordSummary,
    find_record,
    list_records,
    remove_records,
    verify_records,
)
from flare_cli.status import fetch_snapshot
from flare_cli.units import format_size
from flare_core.errors import UsageError

__all__ = ["pool_states", "print_listing", "print_record", "remove", "verify_directory"]

SHOWN_KEY = 16
SHOWN_TOKENS = 16


def pool_states(url: str, key_file: str | None) -> Mapping[str, str]:
    """What the pool has of the records of the server at ``url``, by key. Raises as ``fetch_snapshot``."""
    snapshot, _ = fetch_snapshot(url, key_file, with_records=True)
    pool = None if snapshot.cache is None else snapshot.cache.pool
    if pool is None or pool.records is None:
        msg = f"--url {url}: that server was started without --pool"
        raise UsageError(msg)
    return pool.records


def print_listing(path: Path, *, as_json: bool, pool: Mapping[str, str] | None = None) -> None:
    """List a directory; ``pool``: what the pool has, by key. Raises ``UsageError``."""
    listing = list_records(path)
    if as_json:
        for record in listing.records:
            fields = _fields(record)
            if pool is not None:
                fields["pool"] = pool.get(record.header.identity.key.hex())
            sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")
        for file in listing.unusable:
            broken = {"name": file.name, "size": file.size, "problem": str(file.problem), "reason": file.reason}
            sys.stdout.write(msgspec.json.encode(broken).decode() + "\n")
        return
    console = Console(highlight=False)
    _print_head(console, listing)
    if listing.records:
        table = Table("record", "tokens", "pages", "tail", "row", "size", *(() if pool is None else ("pool",)))
        for record in listing.records:
            identity = record.header.identity
            indent = "  " * record.depth + ("? " if record.orphan else "")
            table.add_row(
                indent + record.name[:SHOWN_KEY],
                f"{identity.start}-{_end(record)}",
                str(identity.num_pages),
                str(identity.tail_tokens) if record.has_tail else "-",
                "yes" if record.has_row else "-",
                format_size(record.size),
                *(() if pool is None else (pool.get(identity.key.hex(), "-"),)),
            )
        console.print(table)
    for file in listing.unusable:
        console.print(f"{file.name[:SHOWN_KEY]}  {format_size(file.size)}  unusable: {file.reason}")


def _print_head(console: Console, listing: Listing) -> None:
    console.print(f"{listing.path}: {len(listing.records)} records, {format_size(listing.num_bytes)}")
    found = listing.set_file
    if found is not None:
        console.print(f"rank {found.rank} of {found.world_size}, set {found.set_fingerprint[:SHOWN_KEY]}")
    if listing.holder is not None:
        console.print(f"in use by {listing.holder}")


def print_record(path: Path, key: str) -> None:
    """Show one record; raises ``UsageError``."""
    record = find_record(list_records(path), key)
    for name, value in _fields(record).items():
        sys.stdout.write(f"{name:<16} {'-' if value is None else value}\n")


def verify_directory(path: Path, keys: Sequence[str]) -> int:
    """Check digests and name what is bad; 1 when something is. Raises ``UsageError``."""
    listing = list_records(path)
    chosen = [find_record(listing, key) for key in keys] if keys else None
    total = sum(record.size for record in (listing.records if chosen is None else chosen))
    columns = TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("verifying", total=total)
        verdicts = verify_records(listing, progress=lambda _, size: progress.advance(task, size), records=chosen)
    bad = [verdict for verdict in verdicts if verdict.reason is not None]
    console = Console(highlight=False, soft_wrap=True)
    for verdict in bad:
        console.print(f"{verdict.name}: {verdict.reason}")
    console.print(f"{len(verdicts) - len(bad)} records are sound, {len(bad)} bad, {format_size(total)} read")
    return 1 if bad else 0


def remove(path: Path, keys: Sequence[str]) -> None:
    """Remove records and their descendants; raises ``UsageError``."""
    removal = remove_records(path, keys)
    console = Console(highlight=False, soft_wrap=True)
    for name in removal.names:
        console.print(f"removed {name}")
    console.print(f"{len(removal.names)} records, {format_size(removal.num_bytes)}")


def _end(record: RecordSummary) -> int:
    """Where the tokens end that can be restored: a tail that was given up is no more than a name in the header."""
    identity = record.header.identity
    return identity.end if record.has_tail else identity.start + identity.num_pages * identity.page_tokens


def _fields(record: RecordSummary) -> dict[str, object]:
    header = record.header
    identity = header.identity
    return {
        "key": identity.key.hex(),
        "parent": identity.parent_key.hex() or None,
        "store_id": identity.store_id.hex(),
        "set": header.set_fingerprint.hex(),
        "rank": header.rank,
        "start": identity.start,
        "end": _end(record),
        "page_tokens": identity.page_tokens,
        "pages": identity.num_pages,
        "tail_tokens": identity.tail_tokens if record.has_tail else 0,
        "row": record.has_row,
        "size": record.size,
        "first_token_ids": list(memoryview(header.token_ids).cast("B").cast("I")[:SHOWN_TOKENS]),
    }
