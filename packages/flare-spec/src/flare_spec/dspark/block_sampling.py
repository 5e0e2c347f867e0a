"""Samples a block slot by slot with the Markov head, and picks the candidates it may be restricted to.

The eager reference of one operation for a whole block; a kernel has to return the same tokens and the same scores.
Rounding, which is part of the contract: bias = bf16(float32 dot product), score = bf16(float32 sum of base logit and
bias), and temperature and noise in float32 on the rounded score. So the scores returned are bit for bit what was
sampled from, and verification uses no other proposal distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from flare_core.compute.philox import STREAM_DRAFT, gumbel
from flare_spec.dspark.markov import MarkovHead

__all__ = ["MarkovBlock", "markov_sample_block", "top_candidates"]

_CONTENDING: Final = 23.0
"""Above every difference that noise can make up for: Gumbel values of 32 bits are at most 22.88."""


@dataclass(frozen=True, slots=True)
class MarkovBlock:
    """A sampled block.

    Attributes:
        tokens: [B, gamma] int64.
        scores: [B, gamma, N] bfloat16, before temperature; slot k's proposal is softmax(scores / temperature), or its
            argmax at temperature 0.
        features: [B, gamma, rank], Markov embeddings of each slot's previous token; rank 0 without a Markov head.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    features: torch.Tensor


def markov_sample_block(
    base: torch.Tensor,
    ids: torch.Tensor | None,
    head: MarkovHead | None,
    *,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int = STREAM_DRAFT,
) -> MarkovBlock:
    """Draft gamma tokens for each of B sequences, each from the scores that follow from the token before.

    Args:
        base: logits [B, gamma, N] bfloat16; NaN counts as minus infinity.
        ids: token ids [B, gamma, N] int64 of the columns, each once in a slot (a column of minus infinity may name any
            id), or None where column n is id n.
        head: the Markov head, or None to sample from the base logits alone.
        hidden: normed rows [B, gamma, hidden] that the base logits were computed from.
        anchors: [B] int64, the tokens before the first slot.
        temperatures: [B] float32; 0 takes the greatest score.
        seeds, positions: [B] int64, keys of the noise and the absolute position of the first drafted token.
        stream: stream of the noise: one of its own, or with coupled verification the stream that tokens are sampled by.

    Ties go to the lowest id. The noise of an id depends on seed, position and id alone.
    """
    batch, gamma, columns = base.shape
    everything = torch.arange(columns, device=base.device).expand(batch, columns)
    state = None if head is None else head.first_state(batch)
    previous = anchors
    tokens, scores, features = [], [], []
    for slot in range(gamma):
        score = base[:, slot]
        if head is not None and state is not None:
            step = head.step(previous, hidden[:, slot], state)
            bias = head.bias(step.operand, None if ids is None else ids[:, slot])
            score = (score.float() + bias.float()).to(torch.bfloat16)
            state = step.state
            features.append(step.embedding)
        score = score.masked_fill(score.isnan(), -math.inf)
        names = everything if ids is None else ids[:, slot]
        noise = _Noise(seeds, positions + slot, stream)
        previous = _choose(score.float(), names, temperatures, noise)
        tokens.append(previous)
        scores.append(score)
    return MarkovBlock(
        tokens=torch.stack(tokens, dim=1),
        scores=torch.stack(scores, dim=1),
        features=torch.stack(features, dim=1) if features else base.new_empty(batch, gamma, 0),
    )


def top_candidates(base: torch.Tensor, count: int, *, first_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` greatest logits of each slot and their ids: [B, gamma, count], bfloat16 and int64.

    ``base`` [B, gamma, N] bfloat16 holds the ids [first_id, first_id + N). Ordered by value, then by lower id, so that
    the choice among equals is one and the same everywhere. Chosen by base logits alone, that is before any token of
    the block is drawn, which keeps speculative sampling exact.
    """
    columns = base.shape[-1]
    values = base.masked_fill(base.isnan(), -math.inf) + 0.0  # and no -0.0, whose bits would sort below 0.0
    bits = values.contiguous().view(torch.int16).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFF, bits)  # integers in the order of the floats
    reversed_ids = columns - 1 - torch.arange(columns, device=base.device)
    best = torch.topk(ordered * columns + reversed_ids, min(count, columns), dim=-1).values
    picked = columns - 1 - best % columns
    return values.gather(-1, picked), picked + first_id


@dataclass(frozen=True, slots=True)
class _Noise:
    """Gumbel noise of one slot: ``seeds`` and ``positions`` [B]."""

    seeds: torch.Tensor
    positions: torch.Tensor
    stream: int

    def of(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Noise [M] of the ids [M] in the rows [M]."""
        return gumbel(self.seeds[rows], self.positions[rows], ids, stream=self.stream)


def _choose(score: torch.Tensor, ids: torch.Tensor, temperatures: torch.Tensor, noise: _Noise) -> torch.Tensor:
    """Ids [B] with the greatest score [B, N] float32, after temperature and noise where the temperature is not 0."""
    random = (temperatures > 0).nonzero().squeeze(1)
    if len(random):
        scaled = score[random] / temperatures[random].unsqueeze(1)
        score = score.index_copy(0, random, _add_noise(scaled, ids[random], random, noise))
    best = score.max(dim=-1, keepdim=True).values
    return ids.masked_fill(score != best, torch.iinfo(torch.int64).max).min(dim=-1).values


def _add_noise(scaled: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, noise: _Noise) -> torch.Tensor:
    """``scaled`` [R, N] plus noise; what would lose to the best id even with the greatest noise is minus infinity."""
    best, column = scaled.max(dim=-1)
    lead = best + noise.of(rows, ids.gather(1, column.unsqueeze(1)).squeeze(1))
    floor = lead - _CONTENDING - best.abs() * 2.0**-20  # sums round, and more so far from zero
    where = ((scaled >= floor.unsqueeze(1)) & (scaled > -math.inf)).nonzero(as_tuple=True)
    noisy = scaled[where] + noise.of(rows[where[0]], ids[where])
    return torch.full_like(scaled, -math.inf).index_put_(where, noisy)
