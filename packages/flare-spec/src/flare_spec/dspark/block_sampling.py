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
    noise = _Noise(temperatures, seeds, positions, stream)
    listed = None if ids is None else noise.listed(ids)
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
        noisy = noise.onto(score.float(), slot) if listed is None else noise.onto_listed(score.float(), listed[:, slot])
        previous = _lowest_best(noisy, names)
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
    count = min(count, base.shape[-1])
    wide = base.float().nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    values, columns = torch.topk(wide, count, dim=-1)
    least = values[..., -1:]
    # Of those that equal the least, topk takes any: take the lowest instead.
    distance = torch.arange(wide.shape[-1], 0, -1, dtype=torch.int32, device=base.device)
    lowest = torch.topk(distance * (wide == least), count, dim=-1).indices
    is_greater = values > least
    place = torch.arange(count, device=base.device) - is_greater.sum(dim=-1, keepdim=True)
    columns = torch.where(is_greater, columns, lowest.gather(-1, place.clamp(min=0)))
    # By id, then stably by value.
    columns = columns.sort(dim=-1).values
    ordered, order = wide.gather(-1, columns).sort(dim=-1, descending=True, stable=True)
    return ordered.to(torch.bfloat16), columns.gather(-1, order) + first_id


def _lowest_best(score: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of the ids [B, N] with the greatest score [B, N] the lowest, [B]."""
    best = score.max(dim=-1, keepdim=True).values
    return ids.masked_fill(score != best, torch.iinfo(torch.int64).max).min(dim=-1).values


@dataclass(frozen=True, slots=True)
class _Noise:
    """Temperature and Gumbel noise of a block; ``temperatures``, ``seeds`` and ``positions`` (of slot 0) [B]."""

    temperatures: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    stream: int

    def listed(self, ids: torch.Tensor) -> torch.Tensor:
        """Noise of all ``ids`` [B, gamma, N] at once, 0 where the temperature is."""
        if not bool((self.temperatures > 0).any()):
            return torch.zeros(ids.shape, device=ids.device)
        slots = torch.arange(ids.shape[1], device=ids.device).view(-1, 1)
        positions = self.positions.view(-1, 1, 1) + slots
        noise = gumbel(self.seeds.view(-1, 1, 1), positions, ids, stream=self.stream)
        return noise.masked_fill(self.temperatures.view(-1, 1, 1) <= 0, 0.0)

    def onto_listed(self, score: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """``score`` [B, N] after temperature, plus ``noise`` [B, N] as :meth:`listed` gives it."""
        return score / torch.where(self.temperatures > 0, self.temperatures, 1.0).unsqueeze(1) + noise

    def onto(self, score: torch.Tensor, slot: int) -> torch.Tensor:
        """The same where column n of ``score`` is id n, for all columns that can have the greatest sum.

        What would lose to the best score even with the greatest noise is minus infinity: noise is dear.
        """
        rows = (self.temperatures > 0).nonzero().squeeze(1)
        if not len(rows):
            return score
        scaled = score[rows] / self.temperatures[rows].unsqueeze(1)
        seeds, positions = self.seeds[rows], self.positions[rows] + slot
        best, ids = scaled.max(dim=-1)
        lead = best + gumbel(seeds, positions, ids, stream=self.stream)
        floor = lead - _CONTENDING - best.abs() * 2.0**-20  # sums round, and more so far from zero
        where = ((scaled >= floor.unsqueeze(1)) & (scaled > -math.inf)).nonzero(as_tuple=True)
        noise = gumbel(seeds[where[0]], positions[where[0]], where[1], stream=self.stream)
        noisy = torch.full_like(scaled, -math.inf).index_put_(where, scaled[where] + noise)
        return score.index_copy(0, rows, noisy)
