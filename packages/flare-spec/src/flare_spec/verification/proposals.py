"""What drafts were drawn from, q, in the forms that drafters have it: one id, a list of ids, or a shard of the row.

A draft must have been drawn from exactly this q (the same scores, temperature and pruning), by noise that
verification does not use: :data:`flare_core.compute.philox.STREAM_DRAFT`, or none of Philox at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flare_core.compute.sampler import clean_
from flare_spec.verification.shard import Shard

__all__ = [
    "Candidates",
    "Dense",
    "DraftPlaces",
    "OneHot",
    "Proposal",
    "ProposalRows",
    "columns_at",
    "local_fields",
    "local_log_q",
    "proposal_rows",
    "rebased_total",
    "sum_exp",
]


@dataclass(frozen=True, slots=True)
class OneHot:
    """q is 1 for the drafted token: lookups, and drafters that take their best token."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """q is the softmax of scores / temperature of the request, over a list of ids; equal on every rank.

    Attributes:
        ids: int64 [sequences, drafts, C], distinct in a list (a score of minus infinity fills a shorter list up).
        scores: floating, of the same shape, before the temperature.
    """

    ids: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """q is the softmax of logits / temperature of the request, over the whole vocabulary.

    Attributes:
        logits: floating [sequences, drafts, own ids], of the ids that the rank has of the target's logits too.
    """

    logits: torch.Tensor


Proposal = OneHot | Candidates | Dense


@dataclass(frozen=True, slots=True)
class ProposalRows:
    """q of chosen drafts, float32 scores divided by the temperature and relative to the greatest.

    Attributes:
        log_q: float64 [n], of the drafted tokens.
        log_total: float64 [n], of the sum of exponentials; log q = scaled - log_total.
        top: float32 [n], the greatest score.
    """

    log_q: torch.Tensor
    log_total: torch.Tensor
    top: torch.Tensor

    def of(self, entries: torch.Tensor) -> ProposalRows:
        """These entries, int64 or bool."""
        return ProposalRows(self.log_q[entries], self.log_total[entries], self.top[entries])


@dataclass(frozen=True, slots=True)
class DraftPlaces:
    """Where chosen drafts stand in the batch, int64 [n] each, and the temperatures of their sequences, float32 [n]."""

    sequence: torch.Tensor
    step: torch.Tensor
    drafted: torch.Tensor
    temperatures: torch.Tensor

    def of(self, entries: torch.Tensor) -> DraftPlaces:
        """These entries, int64 or bool."""
        return DraftPlaces(
            self.sequence[entries], self.step[entries], self.drafted[entries], self.temperatures[entries]
        )


def sum_exp(scaled: torch.Tensor) -> torch.Tensor:
    """Sum of the exponentials of each row, float64 [R], of float32 values that are at most zero."""
    return scaled.exp().sum(dim=-1, dtype=torch.float64)


def columns_at(values: torch.Tensor, token_ids: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The value of one id in each row, [R]; minus infinity where another rank has the id."""
    inside = (token_ids >= shard.start) & (token_ids < shard.stop)
    columns = (token_ids - shard.start).clamp(0, values.shape[1] - 1)
    return torch.where(inside, values.gather(1, columns.unsqueeze(1)).squeeze(1), -math.inf)


def local_fields(proposal: Proposal, places: DraftPlaces, shard: Shard) -> list[torch.Tensor]:
    """What other ranks need of this rank's part of q, [n] each: greatest logit, sum relative to it, drafted logit."""
    if not isinstance(proposal, Dense):
        return []
    logits = _dense_rows(proposal, places)
    top = _finite(logits.max(dim=-1).values)
    sums = sum_exp(_scale(logits, top, places.temperatures))
    return [top, sums, columns_at(logits, places.drafted, shard)]


def proposal_rows(proposal: Proposal, places: DraftPlaces, gathered: list[torch.Tensor]) -> ProposalRows:
    """q of the drafts, from what :func:`local_fields` gave on every rank, [world size, n] each; equal on every rank.

    Raises:
        ValueError: a draft has no probability in its own proposal.
    """
    zeros = torch.zeros_like(places.temperatures)
    if isinstance(proposal, OneHot):
        return ProposalRows(zeros.double(), zeros.double(), zeros)
    if isinstance(proposal, Candidates):
        ids, scores = _candidate_rows(proposal, places)
        top = _finite(scores.max(dim=-1).values)
        scaled = _scale(scores, top, places.temperatures)
        log_total = sum_exp(scaled).log()
        drafted = torch.where(ids == places.drafted.unsqueeze(1), scaled, -math.inf).max(dim=-1).values
    else:
        tops, sums, at = gathered
        top = tops.max(dim=0).values
        log_total = rebased_total(tops, sums, top, places.temperatures).log()
        drafted = (at.max(dim=0).values - top) / places.temperatures
    log_q = drafted.to(torch.float64) - log_total
    if not bool((log_q > -math.inf).all()):
        raise ValueError(
            "a drafted token has no probability in its proposal; pass the scores that the draft was drawn from"
        )
    return ProposalRows(log_q, log_total, top)


def rebased_total(
    tops: torch.Tensor, sums: torch.Tensor, top: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Sums relative to ``tops``, [world size, n] float64, as one sum relative to ``top`` [n], added by rank."""
    shift = (tops.to(torch.float64) - top.to(torch.float64)) / temperatures.to(torch.float64)
    return (sums * shift.exp()).sum(dim=0)


def local_log_q(proposal: Proposal, rows: ProposalRows, places: DraftPlaces, shard: Shard) -> torch.Tensor:
    """log q of the rank's ids, float32 [n, own ids]; minus infinity where q is zero."""
    if isinstance(proposal, Dense):
        scaled = _scale(_dense_rows(proposal, places), rows.top, places.temperatures)
        return scaled - rows.log_total.to(torch.float32).unsqueeze(1)
    if isinstance(proposal, OneHot):
        ids, log_q = places.drafted.unsqueeze(1), rows.log_q.to(torch.float32).unsqueeze(1)
    else:
        ids, scores = _candidate_rows(proposal, places)
        log_q = _scale(scores, rows.top, places.temperatures) - rows.log_total.to(torch.float32).unsqueeze(1)
    inside = (ids >= shard.start) & (ids < shard.stop)
    columns = (ids - shard.start).clamp(0, shard.stop - shard.start - 1)
    empty = log_q.new_full((len(ids), shard.stop - shard.start), -math.inf)
    # The greatest of what falls on a column: filled up places and other ranks' ids bring minus infinity.
    return empty.scatter_reduce_(1, columns, torch.where(inside, log_q, -math.inf), "amax")


def _scale(scores: torch.Tensor, top: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    return (scores - top.unsqueeze(1)) / temperatures.unsqueeze(1)


def _finite(top: torch.Tensor) -> torch.Tensor:
    return top.clamp(min=torch.finfo(top.dtype).min)


def _candidate_rows(proposal: Candidates, places: DraftPlaces) -> tuple[torch.Tensor, torch.Tensor]:
    scores = proposal.scores[places.sequence, places.step].to(torch.float32)
    return proposal.ids[places.sequence, places.step], clean_(scores)


def _dense_rows(proposal: Dense, places: DraftPlaces) -> torch.Tensor:
    logits = proposal.logits[places.sequence, places.step].to(torch.float32)
    if not logits.shape[1]:
        return logits.new_full((len(logits), 1), -math.inf)
    return clean_(logits)
