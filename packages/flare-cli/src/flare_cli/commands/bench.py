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


@bench.command()
@click.option(
    "--directory", metavar="DIR", default=".", show_default="this one",
    help="Where the manager stores; on the disk to measure. Removed afterwards.",
)  # fmt: skip
@click.option("--page-bytes", metavar="SIZE", default="8MiB", show_default=True, help="One page.")
@click.option(
    "--pages", "num_pages", metavar="N", type=click.IntRange(1, 32), default=8, show_default=True,
    help="Pages of a shard.",
)  # fmt: skip
@click.option(
    "--records", "num_records", metavar="N", type=click.IntRange(1, 1000), default=8, show_default=True,
    help="Shards that are moved in a round.",
)  # fmt: skip
@click.option(
    "--connections", metavar="N", type=click.IntRange(1, 64), default=4, show_default=True,
    help="Of the rank, and of the raw transfer.",
)  # fmt: skip
@click.option("--rounds", metavar="N", type=click.IntRange(1, 1000), default=5, show_default=True, help="In turns.")
@click.option("--json", "json_file", metavar="FILE", help="Write the figures there as well.")
def pool(
    *,
    directory: str,
    page_bytes: str,
    num_pages: int,
    num_records: int,
    connections: int,
    rounds: int,
    json_file: str | None,
) -> int:
    """Put one rank's shards into a pool and get them back, beside raw sockets and the raw disk.

    The manager is a process of its own, as is the raw transfer's other end; both move the same bytes over as many
    connections, plain and TLS, in alternating order. Digests are on; every page that comes back is compared.
    """
    import msgspec
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from flare_cli.bench_pool.rank import Shape
    from flare_cli.bench_pool.run import num_steps, print_rows, run_benchmark
    from flare_cli.units import parse_size

    shape = Shape(parse_size(page_bytes), num_pages, num_records, connections)
    columns = TextColumn("measuring"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_steps(rounds))
        rows = run_benchmark(
            shape, directory=Path(directory), num_rounds=rounds, advance=lambda: progress.advance(task)
        )
    print_rows(rows, shape, Console())
    if json_file is not None:
        Path(json_file).write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2))
    return 0


_LATENCY_WORLD_SIZE = 4
_NUM_LATENCY_JOBS = 400
