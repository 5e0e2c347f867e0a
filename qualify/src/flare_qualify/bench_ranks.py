"""Several ranks beside one, on the same cores: throughput of the runner, and its collectives counted.

Each round starts one rank with all threads, then several with an equal part of them; every rank executes the same
plans, its collectives over gloo. Run as ``python -m flare_qualify.bench_ranks --model smollm2 --json FILE``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TypedDict

import torch
from rich.console import Console
from rich.table import Table

from flare_cli.control_group import ControlGroup
from flare_core.compute.collectives import TensorCollectives, connect_collectives
from flare_qualify.engine_sides import FlareSide, make_shape
from flare_qualify.group import free_port
from flare_transport import Address, RendezvousSettings, Security, meet

__all__ = ["Figures", "main", "measure_ranks"]

HOST = "127.0.0.1"
CONNECT_SECONDS = 60.0
KEY = bytes(32)
"""The ranks of a benchmark meet on loopback, unencrypted, and hold nothing."""


class Figures(TypedDict):
    """Of one cell: what, at which batch, tokens a second, and collectives of one step."""

    what: str
    batch: int
    tokens_per_second: float
    collectives_per_step: float


def _join(rank: int, world_size: int, port: int) -> tuple[ControlGroup, TensorCollectives]:
    settings = RendezvousSettings(
        address=Address(HOST, port), rank=rank, world_size=world_size, key=KEY, security=Security.PLAINTEXT
    )
    control = ControlGroup(meet(settings), on_loss=lambda reason: print(reason, file=sys.stderr, flush=True))
    collectives = connect_collectives(
        control.key_value(),
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
        bind_address=HOST,
        timeout_seconds=CONNECT_SECONDS,
    )
    return control, collectives


def run_rank(rank: int, world_size: int, port: int, *, model: Path, context: int, num_tokens: int) -> list[Figures]:
    """What one rank measures: a prefill at batch 1, decodes at batch 1 and 8. Blocks until all ranks are done."""
    control, collectives = _join(rank, world_size, port)
    longest = context + 2 * num_tokens + 2
    side = FlareSide.load(model, 8, longest, rank=rank, world_size=world_size, collectives=collectives)
    figures: list[Figures] = []
    for batch in (1, 8):
        side.fill(context, batch)
        side.decode(num_tokens)
        control.all_gather(b"")
        before = collectives.num_collectives
        rate = side.decode(num_tokens)
        per_step = (collectives.num_collectives - before) / num_tokens
        figures.append(Figures(what="decode", batch=batch, tokens_per_second=rate, collectives_per_step=per_step))
    control.all_gather(b"")
    before = collectives.num_collectives
    rate = side.fill(context, 1)
    per_step = (collectives.num_collectives - before) / side.num_fill_steps(context)
    figures.append(Figures(what="prefill", batch=1, tokens_per_second=rate, collectives_per_step=per_step))
    control.all_gather(b"")
    control.expect_end()
    if rank == 0:
        control.close()
    else:
        control.plans.get()
    return figures


def measure_ranks(world_size: int, *, model: Path, threads: int, context: int, num_tokens: int) -> list[Figures]:
    """Start the ranks as processes with ``threads`` between them; rank zero's figures.

    Raises:
        RuntimeError: a rank failed; its output is on stderr.
    """
    port = free_port()
    base = [sys.executable, "-m", "flare_qualify.bench_ranks", "--model", str(model), "--context", str(context)]
    base += ["--decode-tokens", str(num_tokens), "--threads", str(max(1, threads // world_size))]
    peers = [
        subprocess.Popen([*base, "--rank", f"{rank}/{world_size}/{port}"], stdout=subprocess.DEVNULL)
        for rank in range(1, world_size)
    ]
    first = subprocess.run([*base, "--rank", f"0/{world_size}/{port}"], stdout=subprocess.PIPE, check=False)
    codes = [peer.wait() for peer in peers]
    if first.returncode or any(codes):
        raise RuntimeError(f"ranks of a group of {world_size} ended with {[first.returncode, *codes]}")
    found: list[Figures] = json.loads(first.stdout)
    return found


def _report(rounds: dict[int, list[list[Figures]]], title: str) -> list[dict[str, object]]:
    table = Table(title=title, title_justify="left")
    for heading in ("", "batch", *(f"TP{size} tok/s" for size in rounds), "ratio", "collectives a step"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows: list[dict[str, object]] = []
    first, *rest = rounds
    for at, cell in enumerate(rounds[first][0]):
        rates = {size: median(found[at]["tokens_per_second"] for found in runs) for size, runs in rounds.items()}
        last = rest[-1]
        counted = rounds[last][0][at]["collectives_per_step"]
        ratio = rates[last] / rates[first]
        cells = [f"{rate:.1f}" for rate in rates.values()]
        table.add_row(cell["what"], str(cell["batch"]), *cells, f"{ratio:.2f}", f"{counted:.1f}")
        named = {f"tp{size}": rate for size, rate in rates.items()}
        rows.append({"what": cell["what"], "batch": cell["batch"], "ratio": ratio, "collectives": counted} | named)
    Console().print(table)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        torch.set_num_threads(options.threads)
        rank, world_size, port = (int(part) for part in options.rank.split("/"))
        figures = run_rank(
            rank,
            world_size,
            port,
            model=Path(options.model),
            context=options.context,
            num_tokens=options.decode_tokens,
        )
        print(json.dumps(figures))
        return 0
    rounds: dict[int, list[list[Figures]]] = {1: [], options.world_size: []}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_shape(options.model, Path(scratch))
        for _ in range(options.rounds):
            for world_size, found in rounds.items():
                found.append(
                    measure_ranks(
                        world_size,
                        model=model,
                        threads=options.threads,
                        context=options.context,
                        num_tokens=options.decode_tokens,
                    )
                )
    title = f"{options.model}, fp32, {options.threads} threads in all, context {options.context:,}"
    rows = _report(rounds, title)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
