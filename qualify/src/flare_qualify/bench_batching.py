"""Continuous batching beside static batches: 32 requests of mixed length, through the whole engine.

Static batches of 8 are measured twice: transformers' ``generate``, which computes until a batch's longest output is
done, and this engine when the next 8 requests are added only after the last 8 have ended. Run as
``python -m flare_qualify.bench_batching --model smollm2 --json FILE``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from flare_core.compute.loading import load_runner
from flare_core.engine.request import EngineRequest
from flare_core.sampling import SamplingParams
from flare_qualify.engine_drive import PAGE_TOKENS, serve_all
from flare_qualify.engine_sides import TransformersSide, make_shape

__all__ = ["main", "mixed_requests"]

STATIC_BATCH = 8
TARGET = 1.5
BASELINE = "transformers"
"""What the target is against; this engine leaves finished rows out even of a static batch."""


def mixed_requests(num_requests: int, prompt_tokens: int, *, lengths: tuple[int, int]) -> list[EngineRequest]:
    """Greedy requests with prompts of their own and output lengths spread evenly over ``lengths``, shuffled."""
    generator = np.random.default_rng(5)
    outputs = generator.permutation(np.linspace(*lengths, num_requests).astype(int))
    return [
        EngineRequest(
            request_id=str(index),
            token_ids=generator.integers(0, 40_000, prompt_tokens).astype("<u4").tobytes(),
            params=SamplingParams(max_tokens=int(count), temperature=0.0),
        )
        for index, count in enumerate(outputs)
    ]


def _generate_static(side: TransformersSide, requests: Sequence[EngineRequest]) -> float:
    """The same requests in batches of :data:`STATIC_BATCH` through ``generate``."""
    begin = perf_counter()
    for at in range(0, len(requests), STATIC_BATCH):
        batch = requests[at : at + STATIC_BATCH]
        prompts = np.stack([np.frombuffer(request.token_ids, dtype="<u4") for request in batch])
        side.generate(torch.from_numpy(prompts.astype(np.int64)), max(request.params.max_tokens for request in batch))
    return perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 where continuous batching meets its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs=2, default=[16, 512])
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    requests = mixed_requests(options.requests, options.prompt_tokens, lengths=tuple(options.lengths))
    num_tokens = sum(request.params.max_tokens for request in requests)
    num_pages = options.requests * (-(-(options.prompt_tokens + options.lengths[1]) // PAGE_TOKENS) + 1)
    rates: dict[str, list[float]] = {"continuous": [], "static": [], "transformers": []}
    with tempfile.TemporaryDirectory() as scratch:
        directory = make_shape(options.model, Path(scratch))
        side = TransformersSide.load(directory)
        loaded = load_runner(directory, num_pages=num_pages, max_sequences=options.requests)
        for _ in range(options.repeats):
            seconds = serve_all(loaded, requests, num_pages=num_pages, max_sequences=options.requests)
            rates["continuous"].append(num_tokens / seconds)
            parts = [requests[at : at + STATIC_BATCH] for at in range(0, len(requests), STATIC_BATCH)]
            seconds = sum(serve_all(loaded, part, num_pages=num_pages, max_sequences=STATIC_BATCH) for part in parts)
            rates["static"].append(num_tokens / seconds)
            rates["transformers"].append(num_tokens / _generate_static(side, requests))
    return _report(options.model, rates, num_tokens, options.json)


def _report(model: str, rates: dict[str, list[float]], num_tokens: int, target: Path | None) -> int:
    best = {name: median(values) for name, values in rates.items()}
    ratios = {name: best["continuous"] / best[name] for name in ("static", "transformers")}
    table = Table(title=f"{model}: {num_tokens:,} output tokens")
    for heading in ("", "tok/s", "continuous over it", "target"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("continuous batching", f"{best['continuous']:.1f}", "", "")
    for name, label in (("static", "flare, static batches of 8"), ("transformers", "generate, static batches of 8")):
        table.add_row(label, f"{best[name]:.1f}", f"{ratios[name]:.2f}", f"{TARGET:.2f}" if name == BASELINE else "")
    Console().print(table)
    if target is not None:
        target.write_text(json.dumps({"rates": rates, "ratios": ratios, "num_tokens": num_tokens}, indent=2))
    return 0 if ratios[BASELINE] >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
