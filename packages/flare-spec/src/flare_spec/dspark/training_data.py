"""What a drafter is trained on: sequences with the target's outputs, anchors drawn in them, and each block's labels.

Knows tokens, masks and positions; no parameters and no loss. Source: DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Blocks", "TrainingBatch", "make_blocks", "sample_anchors"]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B sequences of T tokens and what the target computed of them.

    Attributes:
        tokens: [B, T] int64.
        is_answer: [B, T] bool; only tokens of answers are learned, padding is none.
        taps: [B, T, taps * hidden], raw outputs of the tapped layers side by side.
        rows: [B, T, hidden], what the target's head multiplies: row t gives the distribution of token t + 1.
    """

    tokens: torch.Tensor
    is_answer: torch.Tensor
    taps: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """A anchors in each of B sequences and the gamma tokens after each.

    Attributes:
        anchors: [B, A] int64, positions; the context of a block ends before its anchor.
        previous: [B, A, gamma] int64, the true token before each label: the anchor first.
        labels: [B, A, gamma] int64.
        is_learned: [B, A, gamma] bool, a prefix of each block: answers alone, and up to the first token that is none.
    """

    anchors: torch.Tensor
    previous: torch.Tensor
    labels: torch.Tensor
    is_learned: torch.Tensor


def sample_anchors(
    is_answer: torch.Tensor, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """At most ``count`` positions of each row of ``is_answer`` [B, T], uniformly and without repetition.

    Candidates are positions in an answer whose next token is too. Gives positions [B, count] int64 in order and
    whether each is one [B, count] bool; what is none is position 0. ``generator`` lives on the CPU.
    """
    usable = (is_answer[:, :-1] & is_answer[:, 1:]).cpu()
    draws = torch.rand(usable.shape, generator=generator).masked_fill(~usable, -1.0)
    picked = draws.topk(min(count, usable.shape[1]), dim=1)
    is_anchor = torch.zeros(len(usable), count, dtype=torch.bool)
    anchors = torch.zeros(len(usable), count, dtype=torch.int64)
    width = picked.indices.shape[1]
    is_anchor[:, :width] = picked.values >= 0
    anchors[:, :width] = picked.indices
    order = anchors.masked_fill(~is_anchor, torch.iinfo(torch.int64).max).argsort(dim=1)
    is_anchor = is_anchor.gather(1, order)
    anchors = anchors.gather(1, order).masked_fill(~is_anchor, 0)
    return anchors.to(is_answer.device), is_anchor.to(is_answer.device)


def make_blocks(batch: TrainingBatch, anchors: torch.Tensor, is_anchor: torch.Tensor, gamma: int) -> Blocks:
    """The blocks that begin at ``anchors`` [B, A]; those that are none are not learned."""
    count, length = batch.tokens.shape
    offsets = torch.arange(gamma, device=anchors.device)
    before = anchors.unsqueeze(2) + offsets
    rows = torch.arange(count, device=anchors.device).view(-1, 1, 1)
    label_at = (before + 1).clamp(max=length - 1)
    is_learned = is_anchor.unsqueeze(2) & (before + 1 < length) & batch.is_answer[rows, label_at]
    return Blocks(
        anchors=anchors,
        previous=batch.tokens[rows, before.clamp(max=length - 1)],
        labels=batch.tokens[rows, label_at],
        is_learned=is_learned.cumprod(dim=2).bool(),
    )
