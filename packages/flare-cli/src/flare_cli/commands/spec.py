"""``flare spec``: train a block drafter for a model, and measure what a drafter's guesses are worth."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["spec"]


@click.group()
def spec() -> None:
    """Train and measure drafters for speculative decoding."""


_DEVICE = click.option("--device", metavar="DEVICE", default="cpu", show_default=True, help="cpu, or cuda:N.")


@spec.command()
@click.argument("target", metavar="TARGET")
@click.option("-o", "--output", metavar="DIR", required=True, help="Directory of the drafter; work goes on in it.")
@click.option(
    "--answers", metavar="DIR", show_default="answers in the output",
    help="Where prompts and the target's answers are kept; drafters of one target may share it.",
)  # fmt: skip
@click.option("--texts", metavar="DIR", multiple=True, help="Make prompts of the texts under DIR; several times.")
@click.option("--packages/--no-packages", default=True, show_default=True, help="And of installed Python packages.")
@click.option("--prompts", metavar="N", type=click.IntRange(1), default=12_000, show_default=True, help="To train on.")
@click.option(
    "--held-out", metavar="N", type=click.IntRange(0), default=200, show_default=True,
    help="Prompts, of other texts, that 'flare spec eval' measures with.",
)  # fmt: skip
@click.option("--answer-tokens", metavar="N", type=click.IntRange(2), default=192, show_default=True, help="At most.")
@click.option(
    "--sequences", metavar="N", type=click.IntRange(1), default=16, show_default=True, help="Answered at a time."
)
@click.option(
    "--share", metavar="I/N", default="0/1", show_default=True,
    help="Answer every N-th prompt from the I-th (0..) on; N processes with --steps 0 share the work.",
)  # fmt: skip
@click.option(
    "--answer-seconds", metavar="X", type=click.FloatRange(0), show_default="until all are answered",
    help="Stop answering training prompts, and train on the answers there are.",
)  # fmt: skip
@click.option("--steps", metavar="N", type=click.IntRange(0), default=4000, show_default=True, help="0: answers only.")
@click.option("--batch", metavar="N", type=click.IntRange(1), default=64, show_default=True, help="Answers a step.")
@click.option("--anchors", metavar="N", type=click.IntRange(1), default=32, show_default=True, help="Blocks an answer.")
@click.option(
    "--rate", metavar="X", type=click.FloatRange(0), default=1e-3, show_default=True, help="Peak of learning."
)
@click.option("--layers", metavar="N", type=click.IntRange(1), default=1, show_default=True, help="Of the drafter.")
@click.option("--taps", metavar="N,N", show_default="3 spread out", help="Target layers that the drafter reads.")
@click.option("--gamma", metavar="N", type=click.IntRange(1, 31), default=5, show_default=True, help="Tokens a block.")
@click.option("--markov-rank", metavar="N", type=click.IntRange(0), default=32, show_default=True, help="0: no head.")
@click.option("--seed", metavar="N", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@_DEVICE
def train(
    *,
    target: str,
    output: str,
    answers: str | None,
    texts: tuple[str, ...],
    packages: bool,
    prompts: int,
    held_out: int,
    answer_tokens: int,
    sequences: int,
    share: str,
    answer_seconds: float | None,
    steps: int,
    batch: int,
    anchors: int,
    rate: float,
    layers: int,
    taps: str | None,
    gamma: int,
    markov_rank: int,
    seed: int,
    device: str,
) -> int:
    """Train a DSpark drafter for TARGET (a model directory, or smollm2) on the target's own answers.

    Makes prompts, lets the target answer them, trains, and writes the drafter. Run again with the same options, it
    goes on where it was interrupted.
    """
    from flare_cli.draft_training import AnswerOptions, TrainingDisplay, TrainOptions, train_drafter

    answering = AnswerOptions(
        directory=Path(answers) if answers else Path(output) / "answers",
        texts=tuple(map(Path, texts)),
        include_packages=packages,
        num_training=prompts,
        num_held_out=held_out,
        max_tokens=answer_tokens,
        num_sequences=sequences,
        seed=seed,
        share=_share(share),
        max_seconds=answer_seconds,
    )
    options = TrainOptions(
        num_steps=steps,
        batch_size=batch,
        num_anchors=anchors,
        peak_rate=rate,
        num_layers=layers,
        taps=_taps(taps),
        gamma=gamma,
        markov_rank=markov_rank,
        seed=seed,
    )
    with TrainingDisplay() as display:
        train_drafter(target, Path(output), answering, options, device=device, display=display)
    click.echo(output)
    return 0


@spec.command("eval")
@click.argument("target", metavar="TARGET")
@click.option("--draft", metavar="DIR", required=True, help="The drafter.")
@click.option(
    "--answers", metavar="DIR", show_default="answers in the drafter's", help="As 'flare spec train' left them."
)
@click.option("--control", metavar="DIR", help="A drafter trained without a Markov head, to compare with.")
@click.option(
    "--anchors", metavar="N", type=click.IntRange(1), default=32, show_default=True,
    help="Blocks of each answer that expected acceptance is taken over.",
)  # fmt: skip
@click.option("--json", "json_file", metavar="FILE", help="Write the figures there as well.")
@_DEVICE
def evaluate(
    *,
    target: str,
    draft: str,
    answers: str | None,
    control: str | None,
    anchors: int,
    json_file: str | None,
    device: str,
) -> int:
    """Report how many drafted tokens TARGET accepts, by place, on prompts that were not trained on.

    With and without the drafter's Markov head, and with 95 % intervals (paired bootstrap over the prompts).
    """
    from flare_cli.draft_evaluation import EvalOptions, evaluate_drafter, print_report, write_report
    from flare_cli.draft_training import TrainingDisplay

    options = EvalOptions(
        draft=Path(draft),
        answers=Path(answers) if answers else Path(draft) / "answers",
        control=Path(control) if control else None,
        num_anchors=anchors,
    )
    with TrainingDisplay() as display:
        report = evaluate_drafter(target, options, device=device, display=display)
    print_report(report)
    if json_file is not None:
        write_report(report, Path(json_file))
    return 0


def _taps(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of layer numbers such as 1,14,28", param_hint="--taps") from None


def _share(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise click.BadParameter(f"{text!r} is no share such as 0/4, 1/4, 2/4 or 3/4", param_hint="--share")
    return int(index), int(count)
