"""flare's pool beside Mooncake Store over TCP on loopback: the same number of values of the same size, in turns.

    python -m flare_qualify.peers_pool --mooncake-python PYTHON

Mooncake needs an environment of its own, which is named by its interpreter, and libibverbs1::

    python3 -m venv moon && moon/bin/pip install mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy

One client, one server process each, plain TCP (Mooncake has no TLS), values in the server's memory. flare's manager
keeps its store in a file system in memory, so that nobody writes to a disk, and once more on a disk, until durable.
flare verifies digests on both sides in all of it, Mooncake moves bytes only. Each put is of new values; every get is
compared with what was put.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flare_cli.bench_pool.rank import Shape, open_bench_rank, running_manager
from flare_cli.units import format_size, parse_size
from flare_core.errors import FlareError, UsageError
from flare_qualify.group import free_port
from flare_qualify.peer_sides import mooncake_store
from flare_qualify.peers_disk import rotated
from flare_transport import Security

__all__ = ["Rates", "ratio"]

FLARE_MEMORY, FLARE_DISK, MOONCAKE = "flare, in memory", "flare, on disk, durable", "Mooncake Store"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a file system in memory is what is wanted
_PAGE_BYTES = 1 << 20
_MASTER_SECONDS = 20.0
_GIGA = 1e9

Round = Callable[[], tuple[float, float]]
"""Puts new values and gets them back: seconds of both."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of each round of one side, put and get."""

    num_bytes: int
    put_seconds: tuple[float, ...]
    get_seconds: tuple[float, ...]

    @property
    def put(self) -> float:
        """Bytes/s, median."""
        return self.num_bytes / statistics.median(self.put_seconds)

    @property
    def get(self) -> float:
        """Bytes/s, median."""
        return self.num_bytes / statistics.median(self.get_seconds)


def ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast ``own`` is: median of the rounds' ratios of seconds."""
    return statistics.median(theirs / ours for ours, theirs in zip(own, other, strict=True))


@contextlib.contextmanager
def flare_side(shape: Shape, directory: Path) -> Iterator[Round]:
    """A manager over ``directory`` with the values in its memory tier, and one rank."""
    memory = str(3 * shape.num_bytes)
    with contextlib.ExitStack() as stack:
        address, key = stack.enter_context(running_manager(directory, security=Security.PLAINTEXT, memory=memory))
        rank = stack.enter_context(open_bench_rank(shape, address, key, Security.PLAINTEXT))

        def run() -> tuple[float, float]:
            made = rank.store()
            put = rank.put(made)
            rank.commit(made)
            get = rank.get(made)
            rank.forget(made)
            return put, get

        yield run


@contextlib.contextmanager
def mooncake_side(python: Path, shape: Shape, num_rounds: int) -> Iterator[Round]:
    """A master, a process with a segment that holds all rounds, and a client."""
    master, port = f"127.0.0.1:{free_port()}", free_port()
    value_bytes = shape.num_pages * shape.page_bytes
    segment = {"port": free_port(), "master": master, "segment_bytes": (num_rounds + 3) * shape.num_bytes}
    options = {"port": port, "master": master, "num_values": shape.num_records, "value_bytes": value_bytes}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_master(python, master))
        stack.enter_context(_side(python, ("serve",), segment))
        ask = stack.enter_context(_side(python, (), options))

        def run() -> tuple[float, float]:
            found = ask()
            return found["put_seconds"], found["get_seconds"]

        yield run


@contextlib.contextmanager
def _master(python: Path, address: str) -> Iterator[None]:
    found = list(python.absolute().parent.parent.glob("lib/python*/site-packages/mooncake/mooncake_master"))
    if not found:
        raise UsageError(f"{python} has no Mooncake: pip install mooncake-transfer-engine-non-cuda")
    host, _, port = address.rpartition(":")
    command = [str(found[0]), f"-rpc_address={host}", f"-rpc_port={port}", f"-metrics_port={free_port()}"]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_listening(host, int(port), process)
            yield
        finally:
            process.kill()


def _wait_listening(host: str, port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _MASTER_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
            return
        time.sleep(0.05)
    raise FlareError("Mooncake's master did not start")


@contextlib.contextmanager
def _side(
    python: Path, words: tuple[str, ...], options: Mapping[str, object]
) -> Iterator[Callable[[], dict[str, Any]]]:
    command = [str(python), str(Path(mooncake_store.__file__)), *words]
    environment = os.environ | {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:

        def ask(line: str) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - both are pipes
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            found: dict[str, Any] = json.loads(answer) if answer else {"problem": "ended; what it said is above"}
            if found["problem"]:
                raise FlareError(f"Mooncake: {found['problem']}")
            return found

        try:
            ask(json.dumps(options))
            yield lambda: ask("round")
        finally:
            process.kill()


def compare(shape: Shape, num_rounds: int, *, python: Path, directory: Path) -> dict[str, Rates]:
    """Sides in turns, in an order that rotates by one each round; the first round is not counted.

    Raises:
        FlareError: a side failed, or brought back other bytes than were put.
    """
    with contextlib.ExitStack() as stack:
        places = {FLARE_MEMORY: _SHARED_MEMORY, FLARE_DISK: directory}
        sides: dict[str, Round] = {}
        for name, parent in places.items():
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flare-peers-", dir=parent)))
            sides[name] = stack.enter_context(flare_side(shape, place))
        sides[MOONCAKE] = stack.enter_context(mooncake_side(python, shape, num_rounds))
        taken: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(num_rounds + 1):
            for side in rotated(list(sides), number):
                seconds = sides[side]()
                if number:
                    taken[side].append(seconds)
    return {
        side: Rates(shape.num_bytes, tuple(put for put, _ in rounds), tuple(get for _, get in rounds))
        for side, rounds in taken.items()
    }


def show(found: Mapping[str, Rates], shape: Shape, console: Console) -> None:
    """One row a side."""
    value = format_size(shape.num_pages * shape.page_bytes)
    table = Table(title=f"{shape.num_records} values of {value}, TCP on loopback", title_justify="left")
    for heading in ("side", "put GB/s", "get GB/s", "put of Mooncake's", "get of Mooncake's"):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    peer = found[MOONCAKE]
    for side, rates in found.items():
        put, get = ratio(rates.put_seconds, peer.put_seconds), ratio(rates.get_seconds, peer.get_seconds)
        table.add_row(side, f"{rates.put / _GIGA:.2f}", f"{rates.get / _GIGA:.2f}", f"{put:.2f} x", f"{get:.2f} x")
    console.print(table)


def main() -> None:
    """Compare, print, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake-python", type=Path, required=True, metavar="PYTHON", help="that has Mooncake")
    parser.add_argument("--values", nargs="+", default=["16MiB", "4MiB"], metavar="SIZE", help="sizes of a value")
    parser.add_argument("--bytes", default="256MiB", metavar="SIZE", help="of all values (default: 256MiB)")
    parser.add_argument("--connections", type=int, default=4, metavar="N", help="of flare's rank (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each side (default: 5)")
    parser.add_argument("--directory", type=Path, default=Path(), metavar="DIR", help="on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds there as well")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    console = Console()
    try:
        for text in arguments.values:
            value_bytes = parse_size(text)
            shape = Shape(
                _PAGE_BYTES,
                value_bytes // _PAGE_BYTES,
                parse_size(arguments.bytes) // value_bytes,
                arguments.connections,
            )
            found = compare(shape, arguments.rounds, python=arguments.mooncake_python, directory=arguments.directory)
            show(found, shape, console)
            results += [
                {
                    "side": side,
                    "value_bytes": value_bytes,
                    "put_seconds": one.put_seconds,
                    "get_seconds": one.get_seconds,
                }
                for side, one in found.items()
            ]
    except FlareError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
