"""The whole benchmark: checks what it needs, measures each world size in a directory of its own, and cleans up."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from flare_cli.bench_cache.group import open_group
from flare_cli.bench_cache.job_latency import JobLatency, latency_settings, measure_latency
from flare_cli.bench_cache.page_cache import page_cache_method
from flare_cli.bench_cache.report import BenchReport
from flare_cli.bench_cache.settings import GroupSettings, check_settings
from flare_cli.bench_cache.throughput import Throughput, measure_throughput
from flare_cli.units import format_size
from flare_core.errors import UsageError

__all__ = ["BenchOptions", "benchmark_directory", "num_steps", "run_benchmark"]

_EXIT_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command was asked for.

    Attributes:
        settings: of every group; the world size and the directory are set for each.
        world_sizes: groups to measure.
        num_rounds: restores and raw reads of each.
        latency_world_size: ranks of the group for small jobs; None: not measured.
        num_latency_jobs: small jobs in each tier.
    """

    settings: GroupSettings
    world_sizes: Sequence[int]
    num_rounds: int
    latency_world_size: int | None = None
    num_latency_jobs: int = 0


def num_steps(options: BenchOptions) -> int:
    """How often :func:`run_benchmark` calls ``advance``."""
    latency = 0 if options.latency_world_size is None else 1
    return len(options.world_sizes) * (1 + options.num_rounds) + latency


def run_benchmark(options: BenchOptions, *, advance: Callable[[], None] = lambda: None) -> BenchReport:
    """Measure everything; blocks for minutes. What it writes is removed at the end, whatever happens but SIGKILL.

    Raises:
        UsageError: options that cannot be, or too little memory or disk space.
        FlareError: a job failed, a restored page was wrong, or a rank was lost.
    """
    check_settings(options.settings)
    for world_size in options.world_sizes:
        _check_room(options.settings, world_size)
    throughputs: list[Throughput] = []
    latency: JobLatency | None = None
    with _terminating_in_order():
        for world_size in options.world_sizes:
            with benchmark_directory(options.settings.directory) as directory:
                settings = msgspec.structs.replace(options.settings, world_size=world_size, directory=str(directory))
                with open_group(settings) as group:
                    throughputs.append(measure_throughput(group, settings, options.num_rounds, advance=advance))
        if options.latency_world_size is not None:
            with benchmark_directory(options.settings.directory) as directory:
                settings = latency_settings(str(directory), options.latency_world_size)
                with open_group(settings) as group:
                    latency = measure_latency(group, settings, options.num_latency_jobs)
            advance()
    return BenchReport(
        num_cpus=len(os.sched_getaffinity(0)),
        page_cache=page_cache_method(),
        settings=options.settings,
        throughputs=tuple(throughputs),
        latency=latency,
    )


@contextlib.contextmanager
def benchmark_directory(parent: str) -> Iterator[Path]:
    """A new directory under ``parent``, removed with all that is in it.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix="flare-bench-", dir=parent)
    except OSError as error:
        raise UsageError(f"--directory {parent} cannot be written: {error.strerror}; give another one") from error
    with directory as name:
        yield Path(name)


def _check_room(settings: GroupSettings, world_size: int) -> None:
    needed = settings.num_pages * settings.page_bytes * world_size
    what = f"{world_size} ranks of {format_size(settings.bytes_per_rank)}"
    try:
        status = os.statvfs(settings.directory)
    except OSError as error:
        raise UsageError(f"--directory {settings.directory} cannot be used: {error.strerror}") from error
    room = status.f_bavail * status.f_frsize
    if room < settings.disk_bytes * world_size:
        raise UsageError(
            f"{what} do not fit into the {format_size(room)} free in {settings.directory}: "
            "give fewer --bytes, or a --directory with more room"
        )
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        available = _available_memory()
    if available < needed:
        raise UsageError(f"{what} do not fit into the {format_size(available)} of free memory: give fewer --bytes")


def _available_memory() -> int:
    """Memory that can be had without swapping; raises OSError where the kernel does not say."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError("no MemAvailable in /proc/meminfo")


@contextlib.contextmanager
def _terminating_in_order() -> Iterator[None]:
    """SIGTERM ends the process as Ctrl-C does, so that gigabytes of records are not left behind."""

    def terminate(_: int, __: FrameType | None) -> None:
        sys.exit(_EXIT_TERMINATED)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
