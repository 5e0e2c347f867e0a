"""Decoding with drafts beside decoding without, at batch 1: tokens a second, interleaved, and texts that must be equal.

Both sides are flare's engine over one model; a drafter begins anew in each round, so that it has not seen its own
answers. Run as ``python -m flare_qualify.bench_speculation --json FILE``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from flare_cli.model_store import find_default_model
from flare_core.compute.loading import LoadedRunner, load_runner
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine, NoGate
from flare_core.engine.request import AddRequest, EngineEvent, EngineRequest, Finished, Tokens, Usage
from flare_core.engine.scheduler import Scheduler
from flare_core.engine.speculation import SpeculationLimits
from flare_core.sampling import SamplingParams
from flare_spec.config import parse_speculative_config
from flare_spec.drafters import make_drafter

__all__ = ["Cell", "main", "measure"]

PAGE_TOKENS = 64
NUM_PAGES = 256
MAX_LENGTH = 2048
LEAST_RATIO = 0.95
"""Of decoding without drafts, whatever the text: drafting that does not pay is given up."""
REPETITIVE_RATIO = 1.5
"""Of the best drafter on text that repeats itself."""

_LOG_LINE = "2026-12-01 10:0{n}:17 INFO worker-{n} finished batch {n} of 9: 128 records, 0 errors, 0 retries\n"
TEXTS: Mapping[str, str] = {
    "repetitive: a log goes on": "".join(_LOG_LINE.format(n=n) for n in range(1, 6)),
    "counting": "<|im_start|>user\nCount from 1 to 60, one number a line.<|im_end|>\n<|im_start|>assistant\n",
    "code": "<|im_start|>user\nWrite a Python class with five similar getters.<|im_end|>\n<|im_start|>assistant\n",
    "story": "<|im_start|>user\nTell me a story about a lighthouse keeper.<|im_end|>\n<|im_start|>assistant\n",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One text and drafter: medians of decode rates, the median of the rounds' ratios, tokens a verified step."""

    text: str
    drafter: str
    plain: float
    drafted: float
    ratio: float
    num_drafts: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: tuple[int, ...]
    tokens_per_second: float
    usage: Usage


class _Side:
    """An engine of its own for each round, over a model that is loaded once."""

    def __init__(self, directory: Path) -> None:
        self._loaded: LoadedRunner = load_runner(
            directory, page_tokens=PAGE_TOKENS, num_pages=NUM_PAGES, max_model_len=MAX_LENGTH, max_sequences=4
        )

    def answer(self, token_ids: Sequence[int], num_tokens: int, config: str | None) -> _Answer:
        """One request, drafted for as ``config`` says; the rate is from the first token to the last."""
        loaded, runner = self._loaded, self._loaded.runner
        drafter = None if config is None else make_drafter(parse_speculative_config(config), runner.model)
        runner.drafter = drafter
        events: list[tuple[float, EngineEvent]] = []
        engine = Engine(
            Scheduler(
                SchedulerConfig(
                    page_tokens=PAGE_TOKENS,
                    num_pages=NUM_PAGES,
                    max_sequences=4,
                    max_model_len=MAX_LENGTH,
                    vocab_size=loaded.config.vocab_size,
                    set_fingerprint=loaded.identity.fingerprint(),
                    speculation=None if drafter is None else SpeculationLimits(drafter.max_drafts),
                )
            ),
            runner,
            gate=NoGate(),
            store=None,
            send_plan=lambda _: None,
            emit=lambda new: events.extend((time.perf_counter(), event) for event in new),
        )
        prompt = np.array(token_ids, dtype="<u4").tobytes()
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        engine.inbox.put([AddRequest(EngineRequest(request_id="r", token_ids=prompt, params=params))])
        while engine.step():
            pass
        tokens = [(at, event) for at, event in events if isinstance(event, Tokens)]
        ids = tuple(token for _, event in tokens for token in event.token_ids)
        usage = next(event.usage for _, event in events if isinstance(event, Finished))
        return _Answer(ids, (len(ids) - 1) / (tokens[-1][0] - tokens[0][0]), usage)


def measure(
    directory: Path, configs: Mapping[str, str], *, num_tokens: int, num_rounds: int, texts: Mapping[str, str] = TEXTS
) -> list[Cell]:
    """Every text with every drafter, in turns with none.

    Raises:
        AssertionError: a drafter changed a text.
    """
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    side = _Side(directory)
    cells: list[Cell] = []
    for text, name in track([(text, name) for text in texts for name in configs], "measuring", transient=True):
        token_ids = tokenizer.encode(texts[text]).ids
        rounds: list[tuple[_Answer, _Answer]] = []
        for number in range(num_rounds):
            order = (None, configs[name]) if number % 2 else (configs[name], None)
            first, second = (side.answer(token_ids, num_tokens, config) for config in order)
            rounds.append((first, second) if number % 2 else (second, first))
        for plain, drafted in rounds:
            if plain.token_ids != drafted.token_ids:
                raise AssertionError(f"{name} changed the text of {text!r}")
        usage = rounds[-1][1].usage
        cells.append(
            Cell(
                text=text,
                drafter=name,
                plain=median(plain.tokens_per_second for plain, _ in rounds),
                drafted=median(drafted.tokens_per_second for _, drafted in rounds),
                ratio=median(drafted.tokens_per_second / plain.tokens_per_second for plain, drafted in rounds),
                num_drafts=usage.draft_tokens,
                num_accepted=usage.accepted_tokens,
            )
        )
    return cells


def _show(cells: Sequence[Cell], title: str) -> bool:
    table = Table(title=title, title_justify="left")
    for heading in ("text", "drafter", "without tok/s", "with tok/s", "ratio", "drafted", "accepted"):
        table.add_column(heading, justify="left" if heading in {"text", "drafter"} else "right")
    for cell in cells:
        colour = "green" if cell.ratio >= LEAST_RATIO else "red"
        rates = f"{cell.plain:.1f}", f"{cell.drafted:.1f}", f"[{colour}]{cell.ratio:.2f}[/]"
        table.add_row(cell.text, cell.drafter, *rates, str(cell.num_drafts), str(cell.num_accepted))
    console = Console()
    console.print(table)
    best = max(cell.ratio for cell in cells if cell.text.startswith("repetitive"))
    least = min(cell.ratio for cell in cells)
    console.print(f"best on repetitive text {best:.2f} (target {REPETITIVE_RATIO}), least {least:.2f} ({LEAST_RATIO})")
    return best > REPETITIVE_RATIO and least >= LEAST_RATIO


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 where every target is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: the default model")
    parser.add_argument("--draft", type=Path, help="a block drafter's checkpoint for it; default: the packaged one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=192)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    directory = options.model or find_default_model()
    if directory is None:
        parser.error("the default model is not here: flare model get smollm2")
    configs = {method: json.dumps({"method": method}) for method in ("ngram", "suffix", "dspark")}
    if options.draft is not None:
        configs["dspark"] = json.dumps({"method": "dspark", "model": str(options.draft)})
    cells = measure(directory, configs, num_tokens=options.tokens, num_rounds=options.rounds)
    is_met = _show(cells, f"{directory.name}, batch 1, {options.threads} threads, {options.tokens} tokens, greedy")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2))
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
