"""The loss of a block drafter and what it says of acceptance, from rows of drafter and target.

Source: DSpark (arXiv 2607.05147). The decay over positions is that of the published code (4.0), not the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_spec.dspark.config import MarkovKind
from flare_spec.dspark.training_data import Blocks, TrainingBatch
from flare_spec.dspark.training_model import Trainee

__all__ = ["LossReport", "LossWeights", "draft_loss"]


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Cross-entropy with the data, L1 distance to the target's distribution, and the confidences' cross-entropy.

    Label k of a block counts exp(-k / decay).
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True, slots=True)
class LossReport:
    """One batch.

    Attributes:
        total: the weighted loss, a scalar with gradients.
        cross_entropy, distance, confidence: its terms, without gradients; confidence is 0 without such a head.
        acceptance: [gamma], mean probability that label k's draft is accepted if it is reached: 1 - TV(p, q).
        length: mean tokens a round that this predicts, the bonus token included.
    """

    total: torch.Tensor
    cross_entropy: float
    distance: float
    confidence: float
    acceptance: tuple[float, ...]
    length: float


def draft_loss(
    trainee: Trainee,
    batch: TrainingBatch,
    blocks: Blocks,
    *,
    embedding: torch.Tensor,
    head: torch.Tensor,
    weights: LossWeights,
) -> LossReport:
    """The loss of ``blocks``; ``embedding`` and ``head`` [vocabulary, hidden] are the target's and stay as they are.

    Drafts are conditioned on the true tokens before. At least one label must be learned.
    """
    learned = blocks.is_learned
    rows = trainee.rows(batch.taps, blocks, embedding)
    operands, embeddings = trainee.markov(rows, blocks)
    logits = F.linear(rows[learned].to(head.dtype), head).float()
    if trainee.config.markov is not MarkovKind.NONE:
        logits = logits + F.linear(operands[learned], trainee.parameters["markov_head.markov_w2.weight"])
    slots = torch.arange(learned.shape[2], device=learned.device)
    weight = torch.exp(-slots / weights.decay).expand(learned.shape)[learned]
    distance = (logits.softmax(dim=-1) - _target(batch, blocks, head)).abs().sum(dim=-1)
    accepted = 1 - distance.detach() / 2
    terms = [_mean(F.cross_entropy(logits, blocks.labels[learned], reduction="none"), weight), _mean(distance, weight)]
    total = weights.cross_entropy * terms[0] + weights.distance * terms[1]
    confidence = trainee.confidence_logits(rows, embeddings)
    if confidence is not None:
        errors = F.binary_cross_entropy_with_logits(confidence[learned], accepted, reduction="none")
        terms.append(_mean(errors, weight))
        total = total + weights.confidence * terms[2]
    acceptance, length = _acceptance(accepted, learned)
    values = [term.item() for term in terms] + [0.0]
    return LossReport(total, values[0], values[1], values[2], acceptance, length)


def _target(batch: TrainingBatch, blocks: Blocks, head: torch.Tensor) -> torch.Tensor:
    """The target's distributions [N, vocabulary] of the learned labels, from its rows one position before each."""
    sequence, block, slot = blocks.is_learned.nonzero(as_tuple=True)
    before = blocks.anchors[sequence, block] + slot
    with torch.no_grad():
        return F.linear(batch.rows[sequence, before], head).float().softmax(dim=-1)


def _mean(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (values * weight).sum() / weight.sum()


def _acceptance(accepted: torch.Tensor, learned: torch.Tensor) -> tuple[tuple[float, ...], float]:
    """Mean acceptance of each place, and the mean length over blocks that are learned at all."""
    full = torch.zeros(learned.shape, device=learned.device)
    full[learned] = accepted
    flat, is_learned = full.flatten(0, 1), learned.flatten(0, 1)
    places = flat.sum(dim=0) / is_learned.sum(dim=0).clamp(min=1)
    lengths = 1 + flat.cumprod(dim=1).sum(dim=1)
    return tuple(places.tolist()), lengths[is_learned[:, 0]].mean().item()
