"""``make demo``: the main job on real parts, shown in one table.

Two rank processes serve the embedded default model on the CPU and answer the same long prompts cold, from device
memory, from disk after the device copies were dropped, and from disk after every rank was restarted. The answers and
their top-20 log-probabilities must be identical, and both ranks must hold the same record files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from flare_cli.model_store import FetchProgress, fetch_default_model, find_default_model
from flare_qualify.client import Answer, chat, post_json
from flare_qualify.distance import total_variation
from flare_qualify.group import Group, GroupError

__all__ = ["main"]

PROMPT_TOKENS = 6000
"""Length of the document part of a prompt; the default model's context is 8,192 tokens."""

ANSWER_TOKENS = 24
TOP_LOGPROBS = 20
WORLD_SIZE = 2

TIER_OF_PHASE = {"cold": None, "device": "device", "disk": "disk", "disk-after-restart": "disk"}

QUESTIONS = (
    ("README.md", "What is flare?"),
    ("SECURITY.md", "How should a vulnerability be reported?"),
)
"""(last document of the prompt, question about it)."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One row of the table: every prompt answered once in the same state of the caches."""

    name: str
    answers: tuple[Answer, ...]

    @property
    def ttft_seconds(self) -> float:
        """Mean time to first token over the prompts."""
        return sum(answer.ttft_seconds for answer in self.answers) / len(self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all prompts."""
        return sum(answer.prompt_tokens for answer in self.answers)

    def cached(self, tier: str) -> int:
        """Prompt tokens restored from ``tier``, over all prompts."""
        return sum(answer.cached_tokens[tier] for answer in self.answers)


def build_prompts(url: str, documents: Path) -> list[str]:
    """Prompts of about :data:`PROMPT_TOKENS` tokens: the project's documents, each prompt ends with another one."""
    names = sorted(str(path.relative_to(documents)) for path in documents.glob("docs/*.md"))
    names += [last for last, _ in QUESTIONS]
    prompts: list[str] = []
    for last, question in QUESTIONS:
        order = [*(name for name in names if name != last), last]
        text = "\n\n".join((documents / name).read_text() for name in order)
        token_ids = post_json(url, "/tokenize", {"prompt": text})["tokens"][-PROMPT_TOKENS:]
        cut = post_json(url, "/detokenize", {"tokens": token_ids})["prompt"]
        prompts.append(f"{cut}\n\n---\n\n{question}")
    return prompts


def ask_all(name: str, url: str, prompts: Sequence[str], progress: Progress) -> Phase:
    """Answer every prompt, one after the other, greedily and with top-20 log-probabilities."""
    task = progress.add_task(f"{name}: answering {len(prompts)} prompts", total=len(prompts))
    answers: list[Answer] = []
    for number, prompt in enumerate(prompts):
        # A salt of its own keeps a prompt from sharing the chat template's first tokens with another one.
        salt = f"prompt {number}"
        answer = chat(url, prompt, max_tokens=ANSWER_TOKENS, logprobs=True, top_logprobs=TOP_LOGPROBS, cache_salt=salt)
        answers.append(answer)
        progress.advance(task)
    return Phase(name, tuple(answers))


def run_phases(group: Group, documents: Path, progress: Progress) -> tuple[list[Phase], list[str], bool]:
    """All four phases over a started group; also the questions, and whether record files were equal throughout."""
    prompts = build_prompts(group.url, documents)
    phases = [ask_all("cold", group.url, prompts, progress), ask_all("device", group.url, prompts, progress)]
    group.wait_stored()
    post_json(group.url, "/v1/cache/reset", {"tier": "device"})
    phases.append(ask_all("disk", group.url, prompts, progress))
    equal = group.same_record_names()
    task = progress.add_task("restarting every rank", total=None)
    group.stop()
    equal = equal and group.same_record_names()
    group.start()
    progress.update(task, total=1, completed=1)
    phases.append(ask_all("disk-after-restart", group.url, prompts, progress))
    return phases, [question for _, question in QUESTIONS], equal and group.same_record_names()


def worst_distance(phases: Sequence[Phase]) -> tuple[float, bool]:
    """Largest total variation of any answer from the cold one, and whether all texts are equal."""
    cold = phases[0]
    pairs = [(one, other) for phase in phases[1:] for one, other in zip(cold.answers, phase.answers, strict=True)]
    distance = max(total_variation(one.logprobs, other.logprobs) for one, other in pairs)
    has_logprobs = all(answer.logprobs for answer in cold.answers)
    return (distance if has_logprobs else 1.0), all(one.text == other.text for one, other in pairs)


def shortfalls(phases: Sequence[Phase], distance: float, *, same_text: bool, same_files: bool) -> list[str]:
    """What the demonstration promised and did not show; empty when all is well."""
    missing: list[str] = []
    if distance != 0.0:
        missing.append(f"total variation between phases is {distance:.2e}, not 0")
    if not same_text:
        missing.append("answers differ between phases")
    if not same_files:
        missing.append("the ranks do not hold the same record files")
    for phase in phases:
        tier = TIER_OF_PHASE[phase.name]
        missing.extend(
            f"{phase.name}: {answer.cached_tokens[tier]} of {answer.prompt_tokens} prompt tokens came from {tier}"
            for answer in phase.answers
            if tier is not None and answer.cached_tokens[tier] < answer.prompt_tokens - 2
        )
    ratio = phases[0].ttft_seconds / phases[-1].ttft_seconds
    if ratio < 10:
        missing.append(f"cold takes only {ratio:.1f} times as long as disk-after-restart")
    return missing


def phase_table(phases: Sequence[Phase]) -> Table:
    """The table that the demonstration is about."""
    table = Table(
        title=f"Time to first token, {WORLD_SIZE} ranks, {len(phases[0].answers)} prompts", title_justify="left"
    )
    for column in ("phase", "TTFT", "against cold", "prompt", "device", "disk", "computed"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in phases:
        cached = phase.cached("device"), phase.cached("disk")
        table.add_row(
            phase.name,
            f"{phase.ttft_seconds:.3f} s",
            f"{phases[0].ttft_seconds / phase.ttft_seconds:.1f} x",
            str(phase.prompt_tokens),
            *(str(count) for count in cached),
            str(phase.prompt_tokens - sum(cached)),
        )
    return table


def file_table(group: Group) -> Table:
    """Record files of every rank, and what they hold in bytes (sizes differ where heads split unevenly)."""
    table = Table(title="Record files by rank", title_justify="left")
    for column in ("rank", "directory", "records", "MB"):
        table.add_column(column, justify="left" if column == "directory" else "right")
    for rank in range(group.world_size):
        files = group.record_files(rank)
        size = sum(file.num_bytes for file in files) / 1e6
        table.add_row(str(rank), str(group.record_directory(rank)), str(len(files)), f"{size:.1f}")
    return table


def write_summary(path: Path, phases: Sequence[Phase], distance: float, *, same_files: bool) -> None:
    """``build/demo.json``."""
    tiers = ("device", "memory", "disk", "pool")
    summary = {
        "tv_max": distance,
        "records_equal": same_files,
        "phases": [
            {
                "name": phase.name,
                "ttft_seconds": phase.ttft_seconds,
                "prompt_tokens": phase.prompt_tokens,
                "cached_tokens": {tier: phase.cached(tier) for tier in tiers},
                "prompts": [
                    {
                        "ttft_seconds": answer.ttft_seconds,
                        "prompt_tokens": answer.prompt_tokens,
                        "cached_tokens": answer.cached_tokens,
                    }
                    for answer in phase.answers
                ],
            }
            for phase in phases
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n")


def default_model(progress: Progress) -> Path:
    """The embedded default model, fetched and converted on first use."""
    found = find_default_model()
    if found is not None:
        return found
    task = progress.add_task("fetching SmolLM2-135M-Instruct", total=None)

    def show(state: FetchProgress) -> None:
        progress.update(
            task,
            description=f"default model: {state.step}",
            completed=state.done_bytes,
            total=state.total_bytes or None,
        )

    return fetch_default_model(progress=show)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 when everything it promises was seen, else 1."""
    parser = argparse.ArgumentParser(prog="flare_qualify.demo", description=__doc__)
    parser.add_argument("--model", type=Path, help="model directory (default: the embedded default model)")
    parser.add_argument("--documents", type=Path, default=Path.cwd(), help="checkout whose docs/ are the prompts")
    parser.add_argument("--directory", type=Path, default=Path("build/demo"), help="run directory, emptied first")
    parser.add_argument("--json", type=Path, default=Path("build/demo.json"), help="where the figures go")
    settings = parser.parse_args(arguments)
    console = Console()
    shutil.rmtree(settings.directory, ignore_errors=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        model = settings.model or default_model(progress)
        group = Group(model, WORLD_SIZE, settings.directory, ["--threads", "1", "--prefix-cache-min-tail", "0"])
        try:
            task = progress.add_task(f"starting {WORLD_SIZE} ranks", total=None)
            group.start()
            progress.update(task, total=1, completed=1)
            phases, questions, same_files = run_phases(group, settings.documents, progress)
            group.stop()
        except GroupError as error:
            console.print(f"[red]{error}")
            return 1
        finally:
            group.kill_all()
    distance, same_text = worst_distance(phases)
    write_summary(settings.json, phases, distance, same_files=same_files)
    for question, answer in zip(questions, phases[0].answers, strict=True):
        console.print(f"[bold]Q[/] {question}\n[bold]A[/] {answer.text.strip()}\n", highlight=False)
    console.print(phase_table(phases), file_table(group))
    missing = shortfalls(phases, distance, same_text=same_text, same_files=same_files)
    for line in missing:
        console.print(f"[red]not as promised:[/] {line}")
    if not missing:
        console.print(
            f"All answers and top-{TOP_LOGPROBS} log-probabilities are identical in all phases (total variation 0);"
            f" both ranks hold the same record files. Figures: {settings.json}"
        )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
