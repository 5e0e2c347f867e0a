"""``flare spec train``: puts together prompts, the chat template, the engine and the training loop.

Owns the directory of prompts and answers, what is shown meanwhile, and in what order things are done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flare_core.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from flare_core.compute.loading import LoadedRunner
    from flare_spec.dspark.training_loss import LossReport
    from flare_spec.training.answers import Question
    from flare_spec.training.conversations import Conversation

__all__ = [
    "GREEDY",
    "SAMPLED",
    "AnswerOptions",
    "TrainOptions",
    "TrainingDisplay",
    "model_directory",
    "train_drafter",
]

TRAINING: Final = "training"
GREEDY: Final = "held-out-greedy"
SAMPLED: Final = "held-out-sampled"
TEMPERATURE: Final = 0.7
_GREEDY_EVERY: Final = 5
"""Every fifth training prompt is answered greedily, the others at the temperature."""

_PAGE_TOKENS: Final = 32
_SAVE_SECONDS: Final = 60.0
_SAVE_ANSWERS: Final = 2000
_LINE_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What is asked and how it is answered; ``num_sequences`` at a time.

    Attributes:
        share: (0, 1), or (i, n): every n-th prompt from the i-th on, the others being left to other processes.
        max_seconds: when to stop answering training prompts, or None. Held-out ones are all answered, and first.
    """

    directory: Path
    texts: tuple[Path, ...]
    include_packages: bool
    num_training: int
    num_held_out: int
    max_tokens: int
    num_sequences: int
    seed: int
    share: tuple[int, int]
    max_seconds: float | None


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The drafter and its training; ``taps`` None: three, spread out. ``num_steps`` 0: answers only."""

    num_steps: int
    batch_size: int
    num_anchors: int
    peak_rate: float
    num_layers: int
    taps: tuple[int, ...] | None
    gamma: int
    markov_rank: int
    seed: int


class _Prompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``prompts.json``: user messages."""

    seed: int
    training: list[str]
    held_out: list[str]


class TrainingDisplay:
    """Bars on standard error where that is a terminal, and a line every 15 s where not."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._is_live = sys.stderr.isatty()

    def __enter__(self) -> TrainingDisplay:
        if self._is_live:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[_Task]:
        """A bar for as long as the context lasts."""
        bar = self._progress.add_task(name, total=total)
        task = _Task(name, total, self._progress if self._is_live else None, bar)
        yield task
        self._progress.remove_task(bar)
        task.end()


class _Task:
    """One bar."""

    def __init__(self, name: str, total: int, progress: Progress | None, bar: int) -> None:
        self._name = name
        self._total = total
        self._progress = progress
        self._bar = bar
        self._said_at = time.monotonic()
        self._latest = ""

    def advance(self, num_done: int, note: str = "") -> None:
        """``num_done`` of the total are done; ``note`` says how it goes."""
        self._latest = f"{self._name} {num_done}/{self._total} {note}".rstrip()
        if self._progress is not None:
            from rich.progress import TaskID

            self._progress.update(TaskID(self._bar), completed=num_done, description=f"{self._name} {note}".rstrip())
        elif time.monotonic() - self._said_at >= _LINE_SECONDS:
            self._say()

    def end(self) -> None:
        """The last line, where lines are written."""
        if self._progress is None and self._latest:
            self._say()

    def _say(self) -> None:
        print(self._latest, file=sys.stderr, flush=True)
        self._said_at = time.monotonic()


def model_directory(target: str) -> Path:
    """Where the model that is named lies.

    Raises:
        UsageError: nowhere; says how to get one.
    """
    if target == "smollm2":
        from flare_cli.model_store import find_default_model

        found = find_default_model()
        if found is None:
            raise UsageError("smollm2 is not here yet: fetch it with 'flare model get smollm2'")
        return found
    directory = Path(target).expanduser()
    if not (directory / "config.json").is_file():
        raise UsageError(f"{target}: no model directory (no config.json in it); give one, or smollm2")
    return directory


def train_drafter(
    target: str,
    output: Path,
    answering: AnswerOptions,
    options: TrainOptions,
    *,
    device: str,
    display: TrainingDisplay,
) -> None:
    """Answers, then training, as :func:`flare_cli.commands.spec.train` describes. Blocks until all is done."""
    directory = model_directory(target)  # before torch is loaded, which takes seconds

    from flare_core.compute.loading import load_runner
    from flare_spec.dspark.train import TrainSettings
    from flare_spec.training.run import DraftShape, default_taps, draft_config, train_draft, unused_token

    sets = _questions(directory, answering)
    longest = answering.max_tokens + max(len(each.tokens) for one in sets.values() for each in one.values())
    loaded = load_runner(
        directory,
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        page_tokens=_PAGE_TOKENS,
        num_pages=8 + answering.num_sequences * -(-longest // _PAGE_TOKENS),
        max_sequences=answering.num_sequences,
        max_model_len=longest,
    )
    answers = {name: _answered(loaded, name, one, answering, display) for name, one in sets.items()}
    if options.num_steps == 0:
        return
    conversations = [answers[TRAINING][number] for number in sorted(answers[TRAINING])]
    config = loaded.config
    shape = DraftShape(
        taps=default_taps(config.num_layers, 3) if options.taps is None else options.taps,
        gamma=options.gamma,
        num_layers=options.num_layers,
        markov_rank=options.markov_rank,
        mask_token_id=unused_token(conversations, config.vocab_size),
    )
    settings = TrainSettings(
        num_steps=options.num_steps, num_anchors=options.num_anchors, peak_rate=options.peak_rate, seed=options.seed
    )
    with display.task("training", options.num_steps) as task:
        train_draft(
            loaded.runner.model,
            conversations,
            output,
            draft_config(config, shape),
            settings=settings,
            batch_size=options.batch_size,
            report=lambda step, result: task.advance(step + 1, _figures(result)),
        )


def _figures(result: LossReport) -> str:
    places = " ".join(f"{each:.2f}" for each in result.acceptance)
    return f"loss {result.total.item():.3f}  tokens a round {result.length:.3f}  accepted {places}"


def _questions(directory: Path, answering: AnswerOptions) -> Mapping[str, Mapping[int, Question]]:
    """Numbered questions of each set: the chat template around every prompt, in tokens."""
    from flare_cli.text.chat_template import load_chat_template
    from flare_cli.text.tokenizer import load_tokenizer
    from flare_spec.training.answers import Question

    tokenizer = load_tokenizer(directory)
    template = load_chat_template(directory)
    if template is None:
        raise UsageError(f"{directory} brings no chat template; training needs a model that chats")
    prompts = _prompts(answering)

    def tokens(prompt: str) -> tuple[int, ...]:
        text = template.render(
            [{"role": "user", "content": prompt}], max_chars=1 << 16, add_generation_prompt=True, settings={}
        )
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def questions(texts: Sequence[str], *, temperature: float, greedy_every: int = 0) -> dict[int, Question]:
        return {
            at: Question(tokens(text), 0.0 if greedy_every and at % greedy_every == 0 else temperature, seed=at)
            for at, text in enumerate(texts)
        }

    return {
        GREEDY: questions(prompts.held_out, temperature=0.0),
        SAMPLED: questions(prompts.held_out, temperature=TEMPERATURE),
        TRAINING: questions(prompts.training, temperature=TEMPERATURE, greedy_every=_GREEDY_EVERY),
    }


def _prompts(answering: AnswerOptions) -> _Prompts:
    """Those that the directory has, else new ones, which it then has.

    Raises:
        UsageError: it has others than are asked for.
    """
    from flare_spec.training.passages import collect_passages
    from flare_spec.training.prompts import make_prompts

    path = answering.directory / "prompts.json"
    if not path.exists():
        for each in answering.texts:
            if not each.is_dir():
                raise UsageError(f"--texts {each}: no such directory")
        passages = collect_passages(answering.texts, include_packages=answering.include_packages, seed=answering.seed)
        made = make_prompts(
            passages,
            num_training=answering.num_training,
            num_held_out=answering.num_held_out,
            seed=answering.seed,
        )
        prompts = _Prompts(answering.seed, list(made.training), list(made.held_out))
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(msgspec.json.encode(prompts))
        part.replace(path)
        return prompts
    try:
        prompts = msgspec.json.decode(path.read_bytes(), type=_Prompts)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: no file of prompts: {error}; remove it and the answers beside it") from None
    has, asked = (
        (prompts.seed, len(prompts.training), len(prompts.held_out)),
        (answering.seed, answering.num_training, answering.num_held_out),
    )
    if has != asked:
        raise UsageError(
            f"{path} is of seed {has[0]} with {has[1]} prompts and {has[2]} held out, not {asked[0]}, {asked[1]} and "
            f"{asked[2]}; give the same options, or another --answers"
        )
    return prompts


def _answered(
    loaded: LoadedRunner,
    name: str,
    questions: Mapping[int, Question],
    answering: AnswerOptions,
    display: TrainingDisplay,
) -> Mapping[int, Conversation]:
    """Conversations of the questions: those that are kept already, and the others, which are answered now."""
    from flare_spec.training.answers import answer
    from flare_spec.training.conversations import add_conversations, read_conversations

    directory = answering.directory / name
    known = read_conversations(directory)
    for number, kept in known.items():
        if number not in questions or kept.tokens[: kept.num_prompt_tokens] != questions[number].tokens:
            raise CheckpointError(f"{directory} has answers to other prompts; remove it, to answer anew")
    index, num_shares = answering.share
    missing = {at: each for at, each in questions.items() if at % num_shares == index and at not in known}
    limit = answering.max_seconds if name == TRAINING else None
    if limit == 0:
        return known
    fresh: dict[int, Conversation] = {}
    saved_at, num_tokens, began = time.monotonic(), 0, time.monotonic()
    with display.task(f"answers ({name})", len(known) + len(missing)) as task:
        ended = answer(loaded, missing, max_tokens=answering.max_tokens, max_sequences=answering.num_sequences)
        for number, conversation in ended:
            fresh[number] = known[number] = conversation
            num_tokens += len(conversation.tokens) - conversation.num_prompt_tokens
            task.advance(len(known), f"{num_tokens / (time.monotonic() - began):.0f} tokens/s")
            if len(fresh) >= _SAVE_ANSWERS or time.monotonic() - saved_at >= _SAVE_SECONDS:
                add_conversations(directory, fresh)
                fresh, saved_at = {}, time.monotonic()
            if limit is not None and time.monotonic() - began >= limit:
                break
    if fresh:
        add_conversations(directory, fresh)
    return known
