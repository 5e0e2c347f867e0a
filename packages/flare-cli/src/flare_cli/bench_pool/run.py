"""Runs the rounds: raw and pool in turns, for each security and direction; and prints ratios against the limit."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from flare_cli.bench_cache.page_cache import drop_page_cache
from flare_cli.bench_pool.cpu_time import cpu_seconds
from flare_cli.bench_pool.rank import BenchRank, Made, Shape, open_bench_rank, running_manager
from flare_cli.bench_pool.raw import RawSockets, open_raw_sockets, raw_disk_read, raw_disk_write, touched_memory
from flare_transport import Security

__all__ = ["Row", "num_steps", "print_rows", "run_benchmark"]

TARGET_RATIO = 0.8
_GIGA = 1e9


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One direction over one kind of link. Rates in bytes/s, medians; the ratio is the median of the rounds'.

    ``disk_rate``: of the raw disk, None where no disk is involved. ``pool_cpu``, ``socket_cpu``: busy cores, of both
    processes together; where the pool's are all that there are, they are its limit.
    """

    name: str
    pool_rate: float
    socket_rate: float
    disk_rate: float | None
    ratio: float
    pool_cpu: float
    socket_cpu: float


class _Timed(msgspec.Struct, frozen=True):
    """Wall and processor seconds."""

    wall: float
    cpu: float

    @property
    def busy_cores(self) -> float:
        return self.cpu / self.wall


class _Sample(msgspec.Struct, frozen=True):
    pool: _Timed
    socket: _Timed
    disk: float | None = None


def num_steps(num_rounds: int) -> int:
    """How often ``advance`` is called."""
    return 2 * 3 * num_rounds


def run_benchmark(shape: Shape, *, directory: Path, num_rounds: int, advance: Callable[[], None]) -> list[Row]:
    """Everything, in ``directory``, which is emptied of it again."""
    rows: list[Row] = []
    for security in (Security.PLAINTEXT, Security.TLS):
        kind = "TLS" if security is Security.TLS else "TCP"
        with open_raw_sockets(security, shape.num_connections, shape.num_bytes) as sockets:
            root = Path(tempfile.mkdtemp(prefix="flare-bench-pool-", dir=directory))
            try:
                rows += _from_memory(
                    shape, security, kind, root, sockets=sockets, num_rounds=num_rounds, advance=advance
                )
                rows += _with_disk(shape, security, kind, root, sockets=sockets, num_rounds=num_rounds, advance=advance)
            finally:
                shutil.rmtree(root, ignore_errors=True)
    return rows


def _from_memory(
    shape: Shape, security: Security, kind: str, root: Path, *, sockets: RawSockets, num_rounds: int,
    advance: Callable[[], None],
) -> list[Row]:  # fmt: skip
    place = root / "memory"
    place.mkdir()
    samples: list[_Sample] = []
    with (
        running_manager(place, security=security, memory=str(2 * shape.num_bytes)) as (address, key),
        open_bench_rank(shape, address, key, security) as rank,
    ):
        made = rank.store()
        rank.put(made)
        rank.commit(made)
        rank.get(made)
        for number in range(num_rounds):
            first, second = _in_turns(number, lambda: rank.get(made), lambda: sockets.get(shape.num_bytes))
            samples.append(_Sample(first, second))
            advance()
    return [_row(f"get from the manager's memory, {kind}", shape, samples)]


def _with_disk(
    shape: Shape, security: Security, kind: str, root: Path, *, sockets: RawSockets, num_rounds: int,
    advance: Callable[[], None],
) -> list[Row]:  # fmt: skip
    place = root / "disk"
    place.mkdir()
    memory = touched_memory(shape.num_bytes)
    gets: list[_Sample] = []
    puts: list[_Sample] = []
    with (
        running_manager(place, security=security, memory="0") as (address, key),
        open_bench_rank(shape, address, key, security) as rank,
    ):
        for number in range(num_rounds):
            made = rank.store()
            put, raw = _in_turns(number, partial(rank.put, made), lambda: sockets.put(shape.num_bytes))
            files = root / "raw"
            files.mkdir(exist_ok=True)
            written = raw_disk_write(files, memory, num_files=shape.num_records, direct=True, num_threads=4)
            puts.append(_Sample(put, raw, written))
            advance()
            rank.commit(made)
            rank.forget(made)
            gets.append(_get_from_disk(shape, rank, made, place, files, memory=memory, sockets=sockets, number=number))
            advance()
            shutil.rmtree(files)
    return [
        _row(f"get from the manager's disk, {kind}", shape, gets),
        _row(f"put until durable, {kind}", shape, puts),
    ]


def _get_from_disk(
    shape: Shape,
    rank: BenchRank,
    made: Made,
    place: Path,
    files: Path,
    *,
    memory: memoryview,
    sockets: RawSockets,
    number: int,
) -> _Sample:
    def get() -> float:
        drop_page_cache(place)
        return rank.get(made)

    def read() -> float:
        drop_page_cache(files)
        return raw_disk_read(sorted(files.iterdir()), memory, num_threads=shape.num_connections)

    got, raw = _in_turns(number, get, read)
    return _Sample(got, _timed(lambda: sockets.get(shape.num_bytes)), raw.wall)


def _in_turns(number: int, one: Callable[[], float], other: Callable[[], float]) -> tuple[_Timed, _Timed]:
    """Both; which is first alternates."""
    if number % 2:
        second = _timed(other)
        return _timed(one), second
    return _timed(one), _timed(other)


def _timed(work: Callable[[], float]) -> _Timed:
    before = cpu_seconds()
    wall = work()
    return _Timed(wall, cpu_seconds() - before)


def _row(name: str, shape: Shape, samples: list[_Sample]) -> Row:
    ratios = [max(each.socket.wall, each.disk or 0.0) / each.pool.wall for each in samples]
    disks = [each.disk for each in samples if each.disk is not None]
    return Row(
        name=name,
        pool_rate=shape.num_bytes / statistics.median(each.pool.wall for each in samples),
        socket_rate=shape.num_bytes / statistics.median(each.socket.wall for each in samples),
        disk_rate=shape.num_bytes / statistics.median(disks) if disks else None,
        ratio=statistics.median(ratios),
        pool_cpu=statistics.median(each.pool.busy_cores for each in samples),
        socket_cpu=statistics.median(each.socket.busy_cores for each in samples),
    )


def print_rows(rows: list[Row], shape: Shape, console: Console) -> None:
    """A table; rates in GB/s."""
    console.print(
        f"{shape.num_records} shards of {shape.num_pages * shape.page_bytes / (1 << 20):.0f} MiB, "
        f"{shape.num_connections} connections, {os.cpu_count()} cores, digests on; target {TARGET_RATIO} of the limit"
    )
    table = Table("one rank, GB/s", "pool", "raw socket", "raw disk", "of the limit", "busy cores", "raw socket's")
    for row in rows:
        disk = "" if row.disk_rate is None else f"{row.disk_rate / _GIGA:.2f}"
        table.add_row(
            row.name,
            f"{row.pool_rate / _GIGA:.2f}",
            f"{row.socket_rate / _GIGA:.2f}",
            disk,
            f"{row.ratio:.2f}",
            f"{row.pool_cpu:.2f}",
            f"{row.socket_cpu:.2f}",
        )
    console.print(table)
