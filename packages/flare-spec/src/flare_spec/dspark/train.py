"""The training loop of a block drafter: anchors drawn anew each step, AdamW, warm-up and cosine.

Takes batches as they come and reports each step; where batches come from, and when to save, is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from flare_spec.dspark.training_data import TrainingBatch, make_blocks, sample_anchors
from flare_spec.dspark.training_loss import LossReport, LossWeights, draft_loss
from flare_spec.dspark.training_model import Trainee

__all__ = ["TrainSettings", "learning_rate", "new_optimiser", "train"]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Published settings, but for the number of steps, which is the data's.

    Attributes:
        num_anchors: blocks drawn in a sequence.
        warm_up: share of the steps over which the rate rises from 0; then it falls to 0 along a cosine.
        max_norm: of the gradient, over all parameters.
    """

    num_steps: int
    num_anchors: int = 512
    peak_rate: float = 6e-4
    warm_up: float = 0.04
    max_norm: float = 1.0
    seed: int = 0
    weights: LossWeights = field(default_factory=LossWeights)


def learning_rate(settings: TrainSettings, step: int) -> float:
    """The rate of ``step``, counted from 0."""
    warm_steps = max(1, round(settings.warm_up * settings.num_steps))
    if step < warm_steps:
        return settings.peak_rate * (step + 1) / warm_steps
    progress = (step - warm_steps) / max(1, settings.num_steps - warm_steps)
    return settings.peak_rate * 0.5 * (1 + math.cos(math.pi * progress))


def train(
    trainee: Trainee,
    batches: Iterable[TrainingBatch],
    *,
    embedding: torch.Tensor,
    head: torch.Tensor,
    settings: TrainSettings,
    report: Callable[[int, LossReport], None],
    optimiser: torch.optim.Optimizer | None = None,
    first_step: int = 0,
) -> None:
    """Train in place, one step a batch, up to ``settings.num_steps``; ``report`` is called after every step.

    ``embedding`` and ``head`` [vocabulary, hidden] are the target's. A batch without anything to learn is passed over.
    A run that was interrupted goes on with its ``optimiser`` (:func:`new_optimiser`), the step it would have done
    next, and the batches from there on; the anchors of a step depend on seed and step alone.
    """
    parameters = list(trainee.parameters.values())
    optimiser = new_optimiser(trainee) if optimiser is None else optimiser
    for step, batch in zip(range(first_step, settings.num_steps), batches, strict=False):
        # torch takes 32 bits of a seed: seeds of different trainings must not lie beside each other.
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        anchors, is_anchor = sample_anchors(batch.is_answer, settings.num_anchors, generator)
        blocks = make_blocks(batch, anchors, is_anchor, trainee.config.gamma)
        if not bool(blocks.is_learned.any()):
            continue
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimiser.zero_grad()
        result = draft_loss(trainee, batch, blocks, embedding=embedding, head=head, weights=settings.weights)
        result.total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, settings.max_norm)
        optimiser.step()
        report(step, result)


def new_optimiser(trainee: Trainee) -> torch.optim.AdamW:
    """AdamW without weight decay over all parameters; :func:`train` sets its rate each step."""
    return torch.optim.AdamW(list(trainee.parameters.values()), weight_decay=0.0)
