"""flare's restore from disk beside LMCache's and NIXL's, the same bytes, in turns.

    python -m flare_qualify.peers_disk --lmcache-python PYTHON --nixl-python PYTHON

Both peers are optional; each needs an environment of its own, which this names by its interpreter::

    python3 -m venv lmcache && lmcache/bin/pip install torch==2.13.0 lmcache==0.5.6
    python3 -m venv nixl && nixl/bin/pip install torch==2.13.0 nixl-cu13==1.5.1

One rank each. NIXL reads flare's record files; LMCache, whose local disk forgets its files at a restart, stores the
same pages in files of its own, in a process that stays. Before each load the page cache is dropped; every side is
loaded once without being counted, then the sides take turns in an order that rotates by one each round. All of it is
repeated with new processes and files: which memory and which blocks a side happens to get changes its rate for as long
as it keeps them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from flare_cache.directory_files import OsFiles
from flare_cache.record_file import read_header
from flare_cache.record_plan import DEFAULT_RECORD_BYTES
from flare_cache.staged import DEFAULT_NUM_THREADS
from flare_cli.bench_cache.group import open_group
from flare_cli.bench_cache.page_cache import drop_page_cache, page_cache_method
from flare_cli.bench_cache.run import benchmark_directory
from flare_cli.bench_cache.settings import GroupSettings, check_settings
from flare_cli.bench_cache.throughput import store_prompt
from flare_cli.units import format_size, parse_size
from flare_core.errors import FlareError, UsageError
from flare_qualify.peer_sides import lmcache_disk

__all__ = ["Comparison", "compare", "joined", "rotated"]

FLARE, RAW = "flare", "raw read"
PAGE_BYTES = 8 << 20
_SIDES = Path(lmcache_disk.__file__).parent
_QUIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of each side's loads, by side; the n-th loads of all sides belong to one round."""

    num_bytes: int
    seconds: Mapping[str, Sequence[float]]

    def rate(self, side: str) -> float:
        """Bytes/s, median of the rounds."""
        return self.num_bytes / statistics.median(self.seconds[side])

    def ratio(self, side: str, other: str) -> float:
        """Rate of ``side`` over that of ``other``: median of the rounds' ratios."""
        pairs = zip(self.seconds[side], self.seconds[other], strict=True)
        return statistics.median(others / own for own, others in pairs)


class Peer:
    """A side in a process of another interpreter; see :mod:`flare_qualify.peer_sides`."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name = name
        self._process = process

    def ask(self, line: str) -> float:
        """Send a line; seconds of what it asked for.

        Raises:
            FlareError: the peer ended, or loaded wrong bytes.
        """
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101, PT018 - both pipes
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._process.stdout.readline()
        if not answer:
            raise FlareError(f"{self._name} ended; what it said is above")
        result = json.loads(answer)
        if result["problem"]:
            raise FlareError(f"{self._name}: {result['problem']}")
        return float(result["seconds"])


@contextmanager
def peer_side(name: str, python: Path, script: str, options: Mapping[str, object]) -> Iterator[Callable[[], float]]:
    """A load of a peer that has stored and is ready.

    Raises:
        UsageError: there is no such interpreter. FlareError: see :meth:`Peer.ask`.
    """
    command = [str(python), str(_SIDES / script)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise UsageError(f"{name} cannot be started: {python}: {error.strerror}") from error
    peer = Peer(name, process)
    with process:
        try:
            peer.ask(json.dumps(options))
            yield lambda: peer.ask("load")
        finally:
            assert process.stdin is not None  # noqa: S101 - a type's proof: it was asked for
            process.stdin.close()
            try:
                process.wait(_QUIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def rotated(sides: Sequence[str], number: int) -> list[str]:
    """The order of the sides in round ``number``."""
    at = number % len(sides)
    return [*sides[at:], *sides[:at]]


def compare(
    settings: GroupSettings, num_rounds: int, *, lmcache_python: Path | None, nixl_python: Path | None
) -> Comparison:
    """Store with every side and load in turns; blocks for minutes.

    Raises:
        FlareError: a side failed, or loaded other bytes than were stored.
    """
    check_settings(settings)
    directory = Path(settings.directory)
    with ExitStack() as stack:
        group = stack.enter_context(open_group(settings))
        prompt, _, _ = store_prompt(group, settings)
        loads: dict[str, Callable[[], float]] = {FLARE: prompt.restore, RAW: prompt.raw_read}
        options = {
            "num_pages": settings.num_pages,
            "page_bytes": settings.page_bytes,
            "num_threads": settings.num_threads,
            "seed": settings.seed,
        }
        if nixl_python is not None:
            name = "NIXL POSIX, io_uring, O_DIRECT"
            sections = _sections(directory / "rank0")
            loads[name] = stack.enter_context(
                peer_side(name, nixl_python, "nixl_posix.py", {**options, "sections": sections})
            )
        if lmcache_python is not None:
            for direct in (True, False):
                name = f"LMCache local disk, {'O_DIRECT' if direct else 'buffered'}"
                place = directory / f"lmcache-{'direct' if direct else 'buffered'}"
                place.mkdir()
                loads[name] = stack.enter_context(
                    peer_side(
                        name,
                        lmcache_python,
                        "lmcache_disk.py",
                        {**options, "directory": str(place), "direct": direct},
                    )
                )
        return Comparison(settings.num_pages * settings.page_bytes, _take_turns(loads, num_rounds, directory))


def _take_turns(loads: Mapping[str, Callable[[], float]], num_rounds: int, directory: Path) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {side: [] for side in loads}
    # Round 0 is not counted: it makes what lies in caches outside this machine's reach alike for every side.
    for number in range(num_rounds + 1):
        for side in rotated(list(loads), number):
            drop_page_cache(directory)
            taken = loads[side]()
            if number:
                seconds[side].append(taken)
    return seconds


def _sections(directory: Path) -> list[dict[str, object]]:
    """Where each page of the prompt lies in a rank's record files."""
    found: list[dict[str, object]] = []
    for path in sorted(directory.glob("*.rec")):
        fd = os.open(path, os.O_RDONLY)
        try:
            header = read_header(OsFiles(-1), fd)  # only the descriptor is used
        finally:
            os.close(fd)
        first_page = header.identity.start // header.identity.page_tokens
        found += [
            {"path": str(path), "offset": header.layout.section_offset(index), "page": first_page + index}
            for index in range(header.layout.num_pages)
        ]
    return sorted(found, key=lambda section: (section["path"], section["offset"]))


def print_comparison(comparison: Comparison, console: Console) -> None:
    """One row a side."""
    num_rounds = len(comparison.seconds[RAW])
    table = Table(title=f"Load of {format_size(comparison.num_bytes)} from disk", title_justify="left")
    for name in ("side", "GB/s", "of raw read", "flare is"):
        table.add_column(name, justify="left" if name == "side" else "right")
    for side in comparison.seconds:
        of_raw, flare = comparison.ratio(side, RAW), comparison.ratio(FLARE, side)
        table.add_row(side, f"{comparison.rate(side) / 1e9:.2f}", f"{of_raw:.2f}", f"{flare:.2f} x")
    console.print(table)
    console.print(
        f"Medians of {num_rounds} rounds, ratios within a round; page cache: {page_cache_method()}. "
        "Every side's bytes were compared with what was stored. flare verifies digests, the others read only.",
        style="dim",
        highlight=False,
    )


def joined(parts: Sequence[Comparison]) -> Comparison:
    """Repetitions as one comparison of all their rounds."""
    sides = parts[0].seconds
    seconds = {side: [taken for part in parts for taken in part.seconds[side]] for side in sides}
    return Comparison(parts[0].num_bytes, seconds)


def _compare_once(settings: GroupSettings, arguments: argparse.Namespace) -> Comparison:
    with benchmark_directory(settings.directory) as directory:
        return compare(
            msgspec.structs.replace(settings, directory=str(directory.resolve())),
            arguments.rounds,
            lmcache_python=arguments.lmcache_python,
            nixl_python=arguments.nixl_python,
        )


def main() -> None:
    """Compare, print, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lmcache-python", type=Path, metavar="PYTHON", help="interpreter that has lmcache and torch")
    parser.add_argument("--nixl-python", type=Path, metavar="PYTHON", help="interpreter that has nixl-cu13 and numpy")
    parser.add_argument("--bytes", default="1GiB", metavar="SIZE", help="of pages (default: 1GiB; a multiple of 32MiB)")
    parser.add_argument("--directory", default=".", metavar="DIR", help="on the disk to measure (default: this one)")
    parser.add_argument("--threads", type=int, default=DEFAULT_NUM_THREADS, metavar="N", help="disk threads of a side")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="loads of a side in one repetition")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="repetitions with new processes and files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds there as well")
    arguments = parser.parse_args()
    chunk_bytes = PAGE_BYTES * lmcache_disk.PAGES_PER_CHUNK
    settings = GroupSettings(
        world_size=1,
        directory=arguments.directory,
        bytes_per_rank=parse_size(arguments.bytes) // chunk_bytes * chunk_bytes,
        page_bytes=PAGE_BYTES,
        record_bytes=DEFAULT_RECORD_BYTES,
        num_threads=arguments.threads,
        num_outstanding=8,
    )
    try:
        parts = [_compare_once(settings, arguments) for _ in range(arguments.repeats)]
    except FlareError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    comparison = joined(parts)
    print_comparison(comparison, Console())
    if arguments.json is not None:
        result = {"num_bytes": comparison.num_bytes, "seconds": comparison.seconds}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
