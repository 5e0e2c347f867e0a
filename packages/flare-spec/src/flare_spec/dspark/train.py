"""The training of a block drafter, step by step: anchors drawn anew, AdamW, warm-up and cosine; can be resumed.

Takes batches as they come; where they come from, and when to save, is the caller's. Source of the settings: DSpark
(arXiv 2607.05147).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from flare_core.errors import CheckpointError
from flare_spec.dspark.training_data import TrainingBatch, make_blocks, sample_anchors
from flare_spec.dspark.training_loss import LossReport, LossWeights, draft_loss
from flare_spec.dspark.training_model import Trainee

__all__ = ["DraftTraining", "TrainSettings", "learning_rate"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Published settings, but for the number of steps, which is the data's.

    Attributes:
        num_anchors: blocks drawn in a sequence.
        warm_up: share of the steps over which the rate rises from 0; then it falls to 0 along a cosine.
        max_norm: of the gradient, over all parameters.
        seed: of the anchors; those of a step depend on the seed and the step alone.
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


class DraftTraining:
    """A drafter in training, and its optimiser. ``embedding`` and ``head`` [vocabulary, hidden] are the target's."""

    def __init__(
        self,
        trainee: Trainee,
        optimiser: torch.optim.AdamW,
        settings: TrainSettings,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        self._trainee = trainee
        self._optimiser = optimiser
        self._settings = settings
        self._embedding = embedding
        self._head = head
        self._num_done = 0

    @classmethod
    def create(
        cls, trainee: Trainee, settings: TrainSettings, *, embedding: torch.Tensor, head: torch.Tensor
    ) -> DraftTraining:
        """A training at its beginning."""
        optimiser = torch.optim.AdamW(list(trainee.parameters.values()), weight_decay=0.0)
        return cls(trainee, optimiser, settings, embedding=embedding, head=head)

    @property
    def num_done(self) -> int:
        """Steps taken."""
        return self._num_done

    def step(self, batch: TrainingBatch) -> LossReport | None:
        """Train on ``batch`` in place; None where it holds nothing to learn (which is a step all the same)."""
        settings, trainee = self._settings, self._trainee
        # torch takes 32 bits of a seed: seeds of different trainings must not lie beside each other.
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + self._num_done)
        anchors, is_anchor = sample_anchors(batch.is_answer, settings.num_anchors, generator)
        blocks = make_blocks(batch, anchors, is_anchor, trainee.config.gamma)
        rate = learning_rate(settings, self._num_done)
        self._num_done += 1
        if not bool(blocks.is_learned.any()):
            return None
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.zero_grad()
        report = draft_loss(
            trainee, batch, blocks, embedding=self._embedding, head=self._head, weights=settings.weights
        )
        report.total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(trainee.parameters.values()), settings.max_norm)
        self._optimiser.step()
        return report

    def state(self) -> Mapping[str, torch.Tensor]:
        """All that a training is resumed from, as named tensors: parameters, moments and counts of steps.

        Parameters and moments are those in use, not copies: save them before the next step.
        """
        named = {_STEP: torch.tensor([self._num_done])}
        for name, parameter in self._trainee.parameters.items():
            named[name] = parameter.detach()
            for key, value in self._optimiser.state.get(parameter, {}).items():
                named[f"{name}/{key}"] = value if key in _MOMENTS else torch.as_tensor(value).reshape(1)
        return named

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on where :meth:`state` was taken, with the same settings: the next steps are those that it would have had.

        Raises:
            CheckpointError: the state is another drafter's; names the tensor.
        """
        for name, parameter in self._trainee.parameters.items():
            found = state.get(name)
            if found is None or found.shape != parameter.shape:
                shape = None if found is None else tuple(found.shape)
                raise CheckpointError(f"the training state has {name} of shape {shape}, not {tuple(parameter.shape)}")
        for name, parameter in self._trainee.parameters.items():
            parameter.data.copy_(state[name])
            if f"{name}/{_STEP}" in state:
                moments = {key: state[f"{name}/{key}"].to(parameter.device, copy=True) for key in _MOMENTS}
                count = state[f"{name}/{_STEP}"].reshape(()).clone()
                self._optimiser.state[parameter] = {_STEP: count, **moments}
        self._num_done = int(state[_STEP])
