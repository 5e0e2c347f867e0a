"""Time to restore a prompt from the pool, over TCP and TLS, beside a cold start and the local disk.

    python -m flare_qualify.bench_pool_restore --json FILE

Two models: the bundled one at 2,048 and 8,128 tokens, and a small random one, made on the spot, at 32,768 and 131,072.
One instance computes every prompt cold and puts it into two managers; then three instances take turns, round by round:
the first restores from its disk, the others, which have none, from the pool over TCP and over TLS. Managers answer from
their memory. Every answer and its top log-probabilities must equal the cold one's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from flare_cli.model_store import find_default_model
from flare_core.testing.checkpoints import make_tiny_checkpoint
from flare_qualify.client import Answer, post_json
from flare_qualify.distance import total_variation
from flare_qualify.group import Group, GroupError
from flare_qualify.pool_process import PoolProcess, pool_of, wait_flushed, wait_pool
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask, drop_device_copies

__all__ = ["Cell", "main"]

BUNDLED_LENGTHS = (2_048, 8_128)
RANDOM_LENGTHS = (32_768, 131_072)
RANDOM_SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 140_000,
    }
)
"""Small enough that 131,072 tokens are computed in minutes on two cores; 1,536 bytes of KV a token."""

_PAGE_TOKENS = 64
_TOP = 20
_WIDTH = 116
_FLUSH_SECONDS = 300.0
_ASK_SECONDS = 900.0
_WAYS = ("disk", "pool, TCP", "pool, TLS")


@dataclass(slots=True)
class Cell:
    """One prompt length of one model: seconds to the first token, by where its prefix came from."""

    model: str
    num_tokens: int
    cold_seconds: float = 0.0
    restore_seconds: dict[str, list[float]] = field(default_factory=dict)
    distance: float = 0.0
    has_same_text: bool = True

    def speedup(self, way: str) -> float:
        """Cold start over restore, medians."""
        return self.cold_seconds / median(self.restore_seconds[way])

    def of_disk(self, way: str) -> float:
        """How many times as long as the local disk's, median of the rounds' ratios."""
        pairs = zip(self.restore_seconds[way], self.restore_seconds["disk"], strict=True)
        return median(own / disk for own, disk in pairs)


@dataclass(slots=True)
class _Bench:
    """Instances and managers of one model."""

    name: str
    model: Path
    lengths: Sequence[int]
    root: Path
    world_size: int
    threads: int
    groups: list[Group] = field(default_factory=list)
    pools: list[PoolProcess] = field(default_factory=list)

    def run(self, num_rounds: int, console: Console) -> list[Cell]:
        """Everything; raises GroupError where something did not come from where it should."""
        tcp, tls = self._pool("tcp", is_tls=False), self._pool("tls", is_tls=True)
        first = self._group("first", tcp, disk=True)
        cells: list[Cell] = []
        colds: list[Answer] = []
        for number, length in enumerate(self.lengths):
            answer = self._ask(first, number, length)
            if answer.total_cached:
                raise GroupError(f"the cold run of {length} tokens restored {answer.cached_tokens}")
            console.print(f"{self.name}, {length} tokens: cold {answer.ttft_seconds:.2f} s", highlight=False)
            colds.append(answer)
            cells.append(Cell(self.name, length, answer.ttft_seconds))
        self._flush(first)
        # What the disk has, the other manager is found to lack.
        first.stop()
        first.options = self._options(tls)
        first.start()
        self._flush(first)
        ways = dict(zip(_WAYS, (first, self._group("tcp", tcp), self._group("tls", tls)), strict=True))
        for number_of_round in range(num_rounds):
            order = [*ways][number_of_round % 3 :] + [*ways][: number_of_round % 3]
            for number, cell in enumerate(cells):
                for way in order:
                    self._restore(ways[way], way, number, cell, colds[number])
        return cells

    def _restore(self, group: Group, way: str, number: int, cell: Cell, cold: Answer) -> None:
        group.wait_stored()
        drop_device_copies(group.url)
        if way != "disk":
            post_json(group.url, "/v1/cache/reset", {"tier": "memory"})
        answer = self._ask(group, number, cell.num_tokens)
        tier = "disk" if way == "disk" else "pool"
        if answer.cached_tokens[tier] != cell.num_tokens - 1:
            raise GroupError(f"{way}, {cell.num_tokens} tokens: {answer.cached_tokens}\n{group.log(0)[-1500:]}")
        cell.restore_seconds.setdefault(way, []).append(answer.ttft_seconds)
        cell.distance = max(cell.distance, total_variation(answer.logprobs, cold.logprobs))
        cell.has_same_text = cell.has_same_text and answer.text == cold.text

    def _ask(self, group: Group, number: int, length: int) -> Answer:
        prompt = prompt_of(700 + number, length)
        return ask(group.url, prompt, max_tokens=4, logprobs=_TOP, cache_salt=str(number), timeout=_ASK_SECONDS)

    def _flush(self, group: Group) -> None:
        if not wait_flushed(group, timeout=_FLUSH_SECONDS):
            raise GroupError(f"not everything was put into the pool: {pool_of(group)}\n{group.log(0)[-1500:]}")

    def _options(self, pool: PoolProcess) -> tuple[str, ...]:
        num_pages = sum(self.lengths) // _PAGE_TOKENS + 16
        pages = ("--kv-memory", f"{num_pages}pages", "--page-tokens", str(_PAGE_TOKENS), "--max-sequences", "1")
        return (*pages, "--threads", str(self.threads), "--prefix-cache-min-tail", "0", *pool.group_options())

    def _pool(self, name: str, *, is_tls: bool) -> PoolProcess:
        pool = PoolProcess(self.root / f"pool-{name}", is_tls=is_tls)
        self.pools.append(pool)
        if len(self.pools) > 1:
            # Instances that share records share the salt key.
            pool.root.mkdir(parents=True)
            self.pools[0].group_options()
            shutil.copy(self.pools[0].root / "salt.key", pool.root / "salt.key")
        pool.start()
        return pool

    def _group(self, name: str, pool: PoolProcess, *, disk: bool = False) -> Group:
        group = Group(self.model, self.world_size, self.root / name, self._options(pool), disk=disk)
        self.groups.append(group)
        group.start(timeout=300.0)
        if wait_pool(group, "on") is None:
            raise GroupError(f"the pool is not on: {pool_of(group)}\n{pool.log()[-1500:]}")
        return group

    def close(self) -> None:
        """Kill what was started."""
        for group in self.groups:
            group.kill_all()
        for pool in self.pools:
            pool.kill()


def _measure(bench: _Bench, num_rounds: int, console: Console) -> list[Cell]:
    try:
        return bench.run(num_rounds, console)
    finally:
        bench.close()


def show(cells: Sequence[Cell], console: Console) -> None:
    """One row a prompt length."""
    table = Table(title="Time to first token", title_justify="left")
    for heading in ("model", "tokens", "cold", *_WAYS, "cold / TCP", "cold / TLS", "TCP / disk", "TLS / disk", "TV"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for cell in cells:
        seconds = (f"{median(cell.restore_seconds[way]):.3f} s" for way in _WAYS)
        speedups = (f"{cell.speedup(way):.0f} x" for way in _WAYS[1:])
        of_disk = (f"{cell.of_disk(way):.2f}" for way in _WAYS[1:])
        distance = f"{cell.distance:.1e}" if cell.distance else "0"
        table.add_row(
            cell.model, f"{cell.num_tokens:,}", f"{cell.cold_seconds:.2f} s", *seconds, *speedups, *of_disk, distance
        )
    console.print(table)
    console.print("Medians of the rounds; ratios to the disk within a round. Cold: once.", style="dim")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 where an answer differs from the cold one."""
    parser = argparse.ArgumentParser(
        prog="flare_qualify.bench_pool_restore",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=("bundled", "random"), default=["bundled", "random"])
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="restores of each kind (default: 3)")
    parser.add_argument(
        "--world-size", type=int, default=1, metavar="N", help="ranks of the bundled model (default: 1)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each rank (default: 1)")
    parser.add_argument("--directory", type=Path, default=Path("build/bench-pool"), help="emptied first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    settings = parser.parse_args(arguments)
    shutil.rmtree(settings.directory, ignore_errors=True)
    settings.directory.mkdir(parents=True)
    console = Console(width=_WIDTH)
    cells: list[Cell] = []
    for name in settings.models:
        if name == "bundled":
            model, lengths, world_size = find_default_model(), BUNDLED_LENGTHS, settings.world_size
            if model is None:
                parser.exit(1, "the bundled model is not here: flare model get smollm2\n")
        else:
            model, lengths, world_size = settings.directory / "random-model", RANDOM_LENGTHS, 1
            make_tiny_checkpoint(model, "llama", **RANDOM_SHAPE)
        bench = _Bench(name, model, lengths, settings.directory / name, world_size, settings.threads)
        cells += _measure(bench, settings.rounds, console)
    show(cells, console)
    if settings.json is not None:
        settings.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [{name: getattr(cell, name) for name in cell.__dataclass_fields__} for cell in cells]
        settings.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(cell.has_same_text and cell.distance == 0.0 for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
