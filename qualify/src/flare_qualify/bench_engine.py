"""The runner's decode and prefill throughput beside transformers' ``generate``, same checkpoint, same process.

Both sides take turns, so that what else the machine does hits both; the printed ratio is of medians. Run as
``python -m flare_qualify.bench_engine --model smollm2 --json FILE``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from flare_qualify.engine_sides import FlareSide, TransformersSide, make_shape

__all__ = ["Measurement", "main", "measure"]

TARGETS = {("decode", 1): 1.3, ("decode", 8): 0.95, ("prefill", 1): 0.95, ("prefill", 8): 0.95}
LONG_CONTEXT, LONG_TARGET = 6000, 0.9


@dataclass(frozen=True, slots=True)
class Measurement:
    """Tokens per second of both sides, medians of interleaved repeats."""

    what: str
    context: int
    batch: int
    flare: float
    transformers: float
    flare_all: tuple[float, ...]
    transformers_all: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """flare over transformers."""
        return self.flare / self.transformers

    @property
    def target(self) -> float:
        """The least ratio asked for."""
        return LONG_TARGET if self.context >= LONG_CONTEXT and self.what == "decode" else TARGETS[self.what, self.batch]


def measure(
    flare: FlareSide,
    transformers: TransformersSide,
    *,
    what: str,
    context: int,
    batch: int,
    repeats: int,
    num_tokens: int,
) -> Measurement:
    """One cell of the table. ``what`` is "decode" (``num_tokens`` after ``context``) or "prefill"."""
    sides: list[Callable[[], float]] = []
    for side in (flare, transformers):
        if what == "decode":
            side.fill(context, batch)
            sides.append(lambda side=side: side.decode(num_tokens))  # type: ignore[misc]
        else:
            sides.append(lambda side=side: side.prefill(context, batch))  # type: ignore[misc]
    for run in sides:
        run()
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for found, run in zip(rates, sides, strict=True):
            found.append(run())
    return Measurement(what, context, batch, median(rates[0]), median(rates[1]), tuple(rates[0]), tuple(rates[1]))


def show(measurements: Sequence[Measurement], title: str, console: Console) -> None:
    """Print the table."""
    table = Table(title=title)
    for heading in ("", "context", "batch", "flare tok/s", "transformers tok/s", "ratio", "target"):
        table.add_column(heading, justify="left" if not heading else "right")
    for item in measurements:
        style = "green" if item.ratio >= item.target else "red"
        table.add_row(
            item.what,
            f"{item.context:,}",
            str(item.batch),
            f"{item.flare:.1f}",
            f"{item.transformers:.1f}",
            f"[{style}]{item.ratio:.2f}[/]",
            f"{item.target:.2f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 where every ratio meets its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, qwen3-shape, or a Hugging Face directory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 6000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--only", choices=["decode", "prefill"])
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_shape(options.model, Path(scratch))
        longest = max(options.contexts) + 2 * options.decode_tokens + 64
        flare = FlareSide.load(directory, max(options.batches), longest)
        transformers = TransformersSide.load(directory)
        found: list[Measurement] = []
        for what in [options.only] if options.only else ["decode", "prefill"]:
            for context in options.contexts:
                for batch in options.batches:
                    if context >= LONG_CONTEXT and (what == "prefill" and batch > 1):
                        continue  # minutes a repeat, and no target
                    found.append(
                        measure(
                            flare,
                            transformers,
                            what=what,
                            context=context,
                            batch=batch,
                            repeats=options.repeats,
                            num_tokens=options.decode_tokens,
                        )
                    )
                    show(found[-1:], options.model, console)
    show(found, f"{options.model}, fp32, {options.threads} threads", console)
    if options.json is not None:
        rows = [asdict(item) | {"ratio": item.ratio, "target": item.target} for item in found]
        options.json.write_text(json.dumps(rows, indent=2))
    return 0 if all(item.ratio >= item.target for item in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
