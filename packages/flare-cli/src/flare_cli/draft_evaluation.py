"""``flare spec eval``: a drafter over answers to held-out prompts, beside itself without its Markov head.

Owns which measurements are made, and how they are printed and written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from flare_cli.draft_training import GREEDY, SAMPLED, TEMPERATURE, TrainingDisplay, model_directory
from flare_core.errors import UsageError
from flare_spec.training.comparison import Interval, Rounds, Summary, gain, summarise

if TYPE_CHECKING:
    from flare_core.compute.loading import LoadedRunner
    from flare_spec.training.conversations import Conversation

__all__ = ["EvalOptions", "EvalReport", "evaluate_drafter", "print_report", "write_report"]


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What is measured; ``control`` is a drafter trained without a Markov head, or None."""

    draft: Path
    answers: Path
    control: Path | None
    num_anchors: int


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Measurements by "way: variant", and by how much the drafter is above each other variant of its way.

    Ways: ``greedy`` is measured in greedy rounds; ``expected`` is what rejection sampling accepts at the temperature.
    Variants: ``drafter``; ``without Markov``, itself without its head; ``control``.
    """

    temperature: float
    summaries: dict[str, Summary]
    gains: dict[str, Interval]


def evaluate_drafter(target: str, options: EvalOptions, *, device: str, display: TrainingDisplay) -> EvalReport:
    """Measure. Blocks for as long as it takes.

    Raises:
        UsageError: no answers to measure with.
    """
    directory = model_directory(target)  # before torch is loaded, which takes seconds

    from flare_core.compute.loading import load_runner
    from flare_spec.training.conversations import read_conversations

    answers = {
        name: [each for _, each in sorted(read_conversations(options.answers / name).items())]
        for name in (GREEDY, SAMPLED)
    }
    if not all(answers.values()):
        raise UsageError(f"{options.answers} has no answers to held-out prompts; 'flare spec train' makes them")
    loaded = load_runner(directory, device=device, dtype="float32" if device == "cpu" else "bfloat16", num_pages=2)
    results: dict[str, list[Rounds | None]] = {}
    variants = [("drafter", options.draft, True)]
    if _has_markov(options.draft, loaded):
        variants.append(("without Markov", options.draft, False))
    if options.control is not None:
        variants.append(("control", options.control, True))
    for name, draft, use_markov in variants:
        measured = _measure(loaded, draft, answers, options, use_markov=use_markov, name=name, display=display)
        results |= {f"{way}: {name}": rounds for way, rounds in measured.items()}
    return _compared(results)


def _compared(results: Mapping[str, Sequence[Rounds | None]]) -> EvalReport:
    """Over the conversations that have rounds, which are the same for all variants of a way."""
    kept = {name: [each for each in rounds if each is not None and each.num_rounds] for name, rounds in results.items()}
    gains = {
        name: gain(kept[name.split(":")[0] + ": drafter"], rounds)
        for name, rounds in kept.items()
        if not name.endswith(": drafter")
    }
    return EvalReport(TEMPERATURE, {name: summarise(rounds) for name, rounds in kept.items()}, gains)


def _has_markov(directory: Path, loaded: LoadedRunner) -> bool:
    from flare_spec.dspark.weights import load_block_draft

    embedding = loaded.runner.model.embedding
    draft = load_block_draft(directory, loaded.config, dtype=embedding.dtype, device=embedding.device)
    return draft.markov is not None


def _measure(
    loaded: LoadedRunner,
    directory: Path,
    answers: Mapping[str, Sequence[Conversation]],
    options: EvalOptions,
    *,
    use_markov: bool,
    name: str,
    display: TrainingDisplay,
) -> dict[str, list[Rounds | None]]:
    from flare_spec.dspark.training_model import read_trainee
    from flare_spec.dspark.weights import load_block_draft
    from flare_spec.training.acceptance import expected_acceptance, greedy_acceptance

    model = loaded.runner.model
    device, dtype = model.embedding.device, model.embedding.dtype
    draft = load_block_draft(directory, loaded.config, dtype=dtype, device=device)
    trainee = read_trainee(directory, loaded.config, device=device)
    greedy: list[Rounds | None] = []
    expected: list[Rounds | None] = []
    with display.task(name, len(answers[GREEDY]) + len(answers[SAMPLED])) as task:
        for start in range(0, len(answers[GREEDY]), _TOGETHER):
            part = answers[GREEDY][start : start + _TOGETHER]
            greedy += greedy_acceptance(model, draft, part, use_markov=use_markov)
            task.advance(len(greedy), "greedy rounds")
        for each in answers[SAMPLED]:
            expected.append(
                expected_acceptance(
                    model, trainee, each,
                    temperature=TEMPERATURE, num_anchors=options.num_anchors, use_markov=use_markov,
                )
            )  # fmt: skip
            task.advance(len(greedy) + len(expected), "expected acceptance")
    return {"greedy": greedy, "expected": expected}


_TOGETHER = 50
"""Conversations whose greedy rounds go on side by side."""


def print_report(report: EvalReport) -> None:
    """Tables on standard output."""
    console = Console(highlight=False)
    table = Table(title=f"Accepted tokens (expected: rejection sampling at temperature {report.temperature:g})")
    gamma = max(len(each.conditional) for each in report.summaries.values())
    for heading in ("", "rounds", "tokens a round", *(f"place {place + 1}" for place in range(gamma))):
        table.add_column(heading, justify="right" if heading else "left")
    for name, summary in report.summaries.items():
        places = (f"{one:.3f} ({two:.3f})" for one, two in zip(summary.conditional, summary.survival, strict=True))
        table.add_row(name, str(summary.num_rounds), _shown(summary.length), *places)
    console.print(table)
    console.print("place k: accepted if reached (reached and accepted); brackets: 95 % of resampled prompts")
    for name, each in report.gains.items():
        console.print(f"drafter over {name}: {each.value:+.1%} [{each.low:+.1%}, {each.high:+.1%}]")


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def write_report(report: EvalReport, path: Path) -> None:
    """The figures as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
