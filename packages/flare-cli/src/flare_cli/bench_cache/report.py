"""The benchmark's result as JSON and as tables for people."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from flare_cli.bench_cache import job_latency, throughput
from flare_cli.bench_cache.job_latency import JobLatency
from flare_cli.bench_cache.settings import GroupSettings
from flare_cli.bench_cache.throughput import Throughput
from flare_cli.units import format_size

__all__ = ["BenchReport", "print_report", "write_json"]


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of one run.

    Attributes:
        num_cpus: that this process may use; all ranks share them.
        page_cache: how it was dropped before each timed read, in words.
        settings: of the last group that moved bytes; they differ in the world size only.
        throughputs: one a world size.
        latency: of small jobs, where it was asked for.
    """

    num_cpus: int
    page_cache: str
    settings: GroupSettings
    throughputs: tuple[Throughput, ...]
    latency: JobLatency | None


def as_json(report: BenchReport) -> dict[str, object]:
    """Values in bytes, seconds and bytes/s."""
    settings = report.settings
    return {
        "num_cpus": report.num_cpus,
        "page_cache": report.page_cache,
        "bytes_per_rank": settings.num_pages * settings.page_bytes,
        "page_bytes": settings.page_bytes,
        "record_bytes": settings.record_bytes,
        "num_threads": settings.num_threads,
        "num_outstanding": settings.num_outstanding,
        "target_ratio": throughput.TARGET_RATIO,
        "world_sizes": [_throughput_json(entry) for entry in report.throughputs],
        "job_latency": None if report.latency is None else _latency_json(report.latency),
    }


def _throughput_json(entry: Throughput) -> dict[str, object]:
    return {
        "world_size": entry.world_size,
        "num_bytes": entry.num_bytes,
        "num_records": entry.num_records,
        "reads": _reads(entry),
        "store_seconds": entry.store_seconds,
        "store_bytes_per_second": entry.store_rate,
        "restore_bytes_per_second": entry.restore_rate,
        "raw_bytes_per_second": entry.raw_rate,
        "ratio": entry.ratio,
        "rounds": [
            {
                "restore_seconds": one.restore_seconds,
                "raw_seconds": one.raw_seconds,
                "restore_first": one.restore_first,
                "ratio": one.ratio,
            }
            for one in entry.rounds
        ],
    }


def _latency_json(latency: JobLatency) -> dict[str, object]:
    return {
        "world_size": latency.world_size,
        "target_seconds": job_latency.TARGET_SECONDS,
        "tiers": {
            str(tier.tier): {
                "num_jobs": len(tier.seconds),
                "median_seconds": tier.median_seconds,
                "p95_seconds": tier.p95_seconds,
                "sent_median_seconds": tier.sent_median_seconds,
            }
            for tier in latency.tiers
        },
    }


def write_json(report: BenchReport, path: Path) -> None:
    """Write the report; raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(as_json(report)), indent=2) + b"\n")


def print_report(report: BenchReport, console: Console) -> None:
    """Print the tables, and under each how it was measured."""
    if report.throughputs:
        console.print(_throughput_table(report))
        console.print(_throughput_note(report), style="dim", highlight=False)
    if report.latency is not None:
        console.print(_latency_table(report.latency))
        console.print(_latency_note(report.latency, report.num_cpus), style="dim", highlight=False)


def _throughput_table(report: BenchReport) -> Table:
    table = Table(title="Records through the sharded transport, GB/s of all ranks", title_justify="left")
    for name in ("ranks", "bytes", "store", "restore", "raw read", "restore/raw", "least", "most"):
        table.add_column(name, justify="right")
    for entry in report.throughputs:
        ratios = [one.ratio for one in entry.rounds]
        color = "green" if entry.ratio >= throughput.TARGET_RATIO else "red"
        table.add_row(
            str(entry.world_size),
            format_size(entry.num_bytes),
            _rate(entry.store_rate),
            _rate(entry.restore_rate),
            _rate(entry.raw_rate),
            f"[{color}]{entry.ratio:.2f}[/]",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
        )
    return table


def _throughput_note(report: BenchReport) -> str:
    settings, first = report.settings, report.throughputs[0]
    return (
        f"Target: restore/raw at least {throughput.TARGET_RATIO}, the median of {len(first.rounds)} rounds. Pages of "
        f"{format_size(settings.page_bytes)}, reads {_reads(first)}, digests on, every restore compared with what was "
        f"stored. Raw: the same sections by as many processes with {settings.num_threads} threads each. Before each "
        f"read: {report.page_cache}. Rates end with the slowest rank; stores are not synced. "
        f"{report.num_cpus} CPUs for all ranks."
    )


def _latency_table(latency: JobLatency) -> Table:
    table = Table(title=f"One small job at a time, {latency.world_size} ranks, ms", title_justify="left")
    for name in ("tier", "jobs", "median", "95 %", "until sent"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier in latency.tiers:
        table.add_row(
            str(tier.tier),
            str(len(tier.seconds)),
            _milliseconds(tier.median_seconds),
            _milliseconds(tier.p95_seconds),
            _milliseconds(tier.sent_median_seconds),
        )
    return table


def _latency_note(latency: JobLatency, num_cpus: int) -> str:
    verdict = "met" if latency.overhead_seconds < job_latency.TARGET_SECONDS else "missed"
    return (
        f"From lookup to the last rank's acknowledgement, {latency.world_size} ranks on {num_cpus} CPUs. In the memory "
        "tier that is planning, links and acknowledgements, and a copy of one page of 4 KiB; its target, a median "
        f"under {_milliseconds(job_latency.TARGET_SECONDS)}, is {verdict}."
    )


def _reads(entry: Throughput) -> str:
    return "with O_DIRECT" if entry.direct else "buffered and cold"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
