"""Chooses tokens from whole rows of logits, the same on every rank, because every rank has the same bytes.

Order: logit_bias, penalties, ids forbidden by ``min_tokens``, temperature, min-p, top-k, top-p, then Gumbel-max with
Philox noise. Ties go to the lowest id. NaN counts as minus infinity. A batch of plain greedy rows pays for none of it.
Rows are vectorised; only rows with biases, penalties or forbidden ids are visited one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flare_core.compute.filters import keep_filtered_
from flare_core.compute.philox import gumbel
from flare_core.compute.sampling_state import SampleRow

__all__ = ["choose_tokens", "clean_"]

_MAX_GUMBEL = 23.0
"""Above any value of :func:`flare_core.compute.philox.gumbel`: u is at least 2**-33, so G is at most 22.88."""


def clean_(logits: torch.Tensor) -> torch.Tensor:
    """NaN becomes minus infinity and plus infinity the greatest number, in place."""
    return logits.nan_to_num_(nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)


def choose_tokens(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Token ids [R], int64, on the device of ``logits`` [R, vocabulary] float32, which may be changed."""
    if all(row.state.is_plain and not row.state.forbids_stops(row.position) for row in rows):
        return _argmax(logits)
    clean_(logits)
    for index, row in enumerate(rows):
        _adjust_(logits[index], row)
    greedy = [index for index, row in enumerate(rows) if row.state.params.temperature == 0.0]
    random = [index for index, row in enumerate(rows) if row.state.params.temperature != 0.0]
    if not random:
        return _argmax(logits)
    if not greedy:
        return _sample(logits, rows)
    tokens = logits.new_empty(len(rows), dtype=torch.int64)
    tokens[greedy] = _argmax(logits[greedy])
    tokens[random] = _sample(logits[random], [rows[index] for index in random])
    return tokens


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id of the greatest logit; torch reports the first of equals."""
    values, ids = logits.max(dim=-1)
    if logits.device.type != "cpu" or bool(values.isnan().any()):
        ids = clean_(logits.clone()).max(dim=-1).indices
    return ids


def _adjust_(logits: torch.Tensor, row: SampleRow) -> None:
    """Biases, penalties and forbidden ids of one row [vocabulary], in place."""
    state, params = row.state, row.state.params
    if params.logit_bias:
        ids = torch.tensor([token for token, _ in params.logit_bias], device=logits.device)
        values = torch.tensor([value for _, value in params.logit_bias], dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, ids, values)
    counts = row.output_counts()
    if counts is not None and state.in_prompt is not None:
        if params.repetition_penalty != 1.0:
            seen = state.in_prompt | (counts > 0)
            penalty = params.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(seen, penalised, logits))
        logits.sub_(counts * params.frequency_penalty)
        logits.sub_((counts > 0) * params.presence_penalty)
    if state.forbids_stops(row.position):
        logits[list(params.stop_token_ids)] = -math.inf


def _sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Gumbel-max over the rows' filtered logits; all temperatures are positive."""
    device = logits.device
    temperatures = torch.tensor([row.state.params.temperature for row in rows], dtype=torch.float32, device=device)
    # Relative to the best logit, so that no temperature overflows; a row of minus infinities stays one.
    top = logits.max(dim=-1, keepdim=True).values.clamp_(min=torch.finfo(logits.dtype).min)
    scaled = (logits - top).div_(temperatures.unsqueeze(1))
    keep_filtered_(scaled, [row.state.params for row in rows])
    seeds = torch.tensor([_signed(row.state.params.seed) for row in rows], device=device)
    positions = torch.tensor([row.position for row in rows], device=device)
    best, best_ids = scaled.max(dim=-1)
    # An id that would lose to the best one even with the greatest noise needs no noise: the rest is exact.
    floor = best + gumbel(seeds, positions, best_ids) - _MAX_GUMBEL
    contending = (scaled >= floor.unsqueeze(1)) & (scaled > -math.inf)
    where = contending.nonzero()
    noise = gumbel(seeds[where[:, 0]], positions[where[:, 0]], where[:, 1])
    scores = torch.full_like(scaled, -math.inf)
    scores[where[:, 0], where[:, 1]] = scaled[where[:, 0], where[:, 1]] + noise
    return scores.max(dim=-1).indices


def _signed(seed: int) -> int:
    """The 64 bits of ``seed`` as two's complement, which is what an int64 tensor holds."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
