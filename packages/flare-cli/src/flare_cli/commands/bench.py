"""``flare bench``: measurements of this machine and of flare's parts on it."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure flare's parts on this machine."""


@bench.command()
@click.option(
    "--world-size", "world_sizes", metavar="N", type=click.IntRange(1, 64), multiple=True, default=(1, 2),
    show_default=True, help="Ranks, each a process on this host; may be given several times.",
)  # fmt: skip
@click.option("--bytes", "num_bytes", metavar="SIZE", default="2GiB", show_default=True, help="Pages of each rank.")
@click.option(
    "--directory", metavar="DIR", default=".", show_default="this one",
    help="Where to write the records; on the disk to measure. Removed afterwards.",
)  # fmt: skip
@click.option("--record-bytes", metavar="SIZE", default="256MiB", show_default=True, help="Largest record file.")
@click.option("--page-bytes", metavar="SIZE", default="4MiB", show_default=True, help="One page on each rank.")
@click.option(
    "--threads", metavar="N", type=click.IntRange(1, 256), show_default="the server's",
    help="Disk threads of each rank, and threads of its raw read.",
)  # fmt: skip
@click.option(
    "--depth", metavar="N", type=click.IntRange(1, 256), default=8, show_default=True, help="Jobs under way at a time."
)
@click.option(
    "--rounds", metavar="N", type=click.IntRange(1, 1000), default=5, show_default=True,
    help="Restores and raw reads, in turns.",
)  # fmt: skip
@click.option("--job-latency", is_flag=True, help="Measure what a small job costs at world size 4, too.")
@click.option("--json", "json_file", metavar="FILE", help="Write the figures there as well.")
def cache(
    *,
    world_sizes: tuple[int, ...],
    num_bytes: str,
    directory: str,
    record_bytes: str,
    page_bytes: str,
    threads: int | None,
    depth: int,
    rounds: int,
    job_latency: bool,
    json_file: str | None,
) -> int:
    """Store records through the sharded transport of a real group of ranks and restore them, beside raw reads.

    Every rank is a process with its own record directory, linked as 'flare run' links them; page memory is plain
    memory with known content. Both sides read the same bytes from disk, one after the other, in alternating order.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from flare_cache.staged import DEFAULT_NUM_THREADS
    from flare_cli.bench_cache.report import print_report, write_json
    from flare_cli.bench_cache.run import BenchOptions, num_steps, run_benchmark
    from flare_cli.bench_cache.settings import GroupSettings
    from flare_cli.units import parse_size

    settings = GroupSettings(
        world_size=1,
        directory=directory,
        bytes_per_rank=parse_size(num_bytes),
        page_bytes=parse_size(page_bytes),
        record_bytes=parse_size(record_bytes),
        num_threads=threads or DEFAULT_NUM_THREADS,
        num_outstanding=depth,
    )
    options = BenchOptions(
        settings=settings,
        world_sizes=world_sizes,
        num_rounds=rounds,
        latency_world_size=_LATENCY_WORLD_SIZE if job_latency else None,
        num_latency_jobs=_NUM_LATENCY_JOBS,
    )
    columns = TextColumn("measuring"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_steps(options))
        report = run_benchmark(options, advance=lambda: progress.advance(task))
    print_report(report, Console())
    if json_file is not None:
        write_json(report, Path(json_file))
    return 0


_LATENCY_WORLD_SIZE = 4
_NUM_LATENCY_JOBS = 400
