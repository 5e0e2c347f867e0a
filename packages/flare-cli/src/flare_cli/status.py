"""Fetches the snapshot of a running server and prints it for people. Standard library HTTP; knows no engine."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flare_cli.snapshot import CacheSnapshot, ClusterSnapshot, PoolSnapshot
from flare_cli.units import format_duration, format_size
from flare_core.errors import FlareError, UsageError

__all__ = ["fetch_snapshot", "print_snapshot"]

TIMEOUT_SECONDS = 5.0


def fetch_snapshot(url: str, key_file: str | None, *, with_records: bool = False) -> tuple[ClusterSnapshot, str]:
    """The snapshot, and its JSON as sent; ``with_records``: with every record's state in the pool. Blocks up to 5 s.

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
        connection.request("GET", "/v1/cluster?records=1" if with_records else "/v1/cluster", headers=headers)
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
    console = Console(highlight=False)
    detail = f" ({snapshot.detail})" if snapshot.detail else ""
    ranks = "1 rank" if snapshot.world_size == 1 else f"{snapshot.world_size} ranks"
    console.print(
        f"[bold]{snapshot.model}[/] {snapshot.state}{detail}, up {format_duration(round(snapshot.uptime_seconds))}, "
        f"{ranks}, context {snapshot.max_model_len}"
    )
    engine = snapshot.engine
    if engine is not None:
        ended = ", ".join(f"{count} {reason}" for reason, count in sorted(engine.finished.items())) or "none ended"
        console.print(
            f"requests  {engine.running} running, {engine.waiting} waiting, {engine.fetching} restoring; {ended}"
        )
        console.print(
            f"pages     {engine.pages_free} free, {engine.pages_held} held, {engine.pages_cached} cached, "
            f"{engine.pages_quarantined} quarantined of {snapshot.num_pages}"
        )
        hits = ", ".join(f"{count} from {tier}" for tier, count in engine.hit_tokens.items() if count)
        console.print(f"prompts   {engine.lookup_tokens} tokens looked up, {hits or 'none'} restored")
    if snapshot.cache is not None:
        _print_cache(console, snapshot.cache)
    if len(snapshot.ranks) > 1:
        table = Table("rank", "address", "step", "silent")
        for rank in snapshot.ranks:
            table.add_row(str(rank.rank), rank.address, str(rank.step), f"{rank.silent_seconds:.1f} s")
        console.print(table)


def _print_cache(console: Console, cache: CacheSnapshot) -> None:
    table = Table("tier", "records", "used", "limit", "stored", "evicted", "failed")
    for tier in cache.tiers:
        used, limit = format_size(tier.charged_bytes), format_size(tier.limit_bytes)
        counts = (tier.records_stored, tier.records_evicted, tier.records_failed)
        table.add_row(tier.tier, str(tier.num_records), used, limit, *map(str, counts))
    console.print(table)
    if cache.pool is not None:
        _print_pool(console, cache.pool)
    for tier in cache.tiers:
        for what, reason in (("stores", tier.stores_stopped), ("reads", tier.reads_stopped)):
            if reason is not None:
                console.print(f"[bold red]{tier.tier}: no {what}[/], {escape(reason)}")


def _print_pool(console: Console, pool: PoolSnapshot) -> None:
    colour = "green" if pool.state == "on" else "bold red"
    lasting = format_duration(round(pool.state_seconds))
    console.print(f"pool      {pool.url} [{colour}]{pool.state}[/] for {lasting}, {pool.records_in_pool} records in it")
    for rank, reason in pool.reasons.items():
        console.print(f"          {'every rank' if rank == 'all' else f'rank {rank}'}: {escape(reason)}")
    used, limit = format_size(pool.pending_bytes), format_size(pool.pending_limit_bytes)
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(pool.dropped.items()) if count)
    console.print(
        f"puts      {pool.pending + pool.backlog} pending ({used} of {limit}), {pool.records_put} put, "
        f"{dropped or 'none'} dropped"
    )
    rates = [
        None if pool.pool_latency_seconds is None else f"{1000 * pool.pool_latency_seconds:.1f} ms to the pool",
        None if pool.pool_bytes_per_second is None else f"{format_size(round(pool.pool_bytes_per_second))}/s from it",
        None if pool.prefill_tokens_per_second is None else f"{pool.prefill_tokens_per_second:.0f} tokens/s prefill",
    ]
    shown = ", ".join(rate for rate in rates if rate is not None) or "not measured yet"
    console.print(f"rates     {shown}; {pool.restores_refused} restores not worth it")
