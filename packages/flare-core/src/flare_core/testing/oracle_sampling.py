"""Choice of the oracle model's next token and its log-probabilities. Pure functions over one row of scores.

The order of application is ``SamplingParams``'s. The noise derives from (seed, position, id) by SplitMix64 instead of
Philox: seeded texts of the oracle are reproducible, and are not those of the real sampler.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flare_core.plan import TokenLogprobs
from flare_core.sampling import SamplingParams
from flare_core.testing.oracle_math import Floats, mix_int, uniform

__all__ = ["choose_token", "token_logprobs"]


def choose_token(
    logits: Floats,
    params: SamplingParams,
    *,
    position: int,
    num_outputs: int,
    prompt_counts: NDArray[np.int64],
    output_counts: NDArray[np.int64],
) -> int:
    """The id at ``position``, chosen after ``num_outputs`` outputs; the counts say how often each id has occurred."""
    logits = _adjust(logits, params, num_outputs, prompt_counts, output_counts)
    if params.temperature == 0:
        return int(np.argmax(logits))
    logits = _restrict(logits / params.temperature, params)
    noise = uniform(mix_int((params.seed ^ mix_int(position + 1)) & ((1 << 64) - 1)), len(logits))
    return int(np.argmax(logits - np.log(-np.log(noise))))


def _adjust(
    logits: Floats,
    params: SamplingParams,
    num_outputs: int,
    prompt_counts: NDArray[np.int64],
    output_counts: NDArray[np.int64],
) -> Floats:
    logits = logits.copy()
    for token, value in params.logit_bias:
        logits[token] += value
    if params.repetition_penalty != 1:
        seen = (prompt_counts + output_counts) > 0
        scaled = np.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = np.where(seen, scaled, logits)
    logits -= params.presence_penalty * (output_counts > 0) + params.frequency_penalty * output_counts
    if num_outputs < params.min_tokens and params.stop_token_ids:
        logits[list(params.stop_token_ids)] = -np.inf
    return logits


def _restrict(logits: Floats, params: SamplingParams) -> Floats:
    if params.min_p > 0:
        logits = np.where(logits < logits.max() + np.log(params.min_p), -np.inf, logits)
    order = np.argsort(-logits, kind="stable")
    if 0 < params.top_k < len(logits):
        logits[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        weights = np.exp(logits[order] - logits[order[0]])
        before = np.cumsum(weights) - weights
        logits[order[before >= params.top_p * weights.sum()]] = -np.inf
    return logits


def token_logprobs(logits: Floats, token: int, num_top: int) -> TokenLogprobs:
    """Raw log-probability of ``token`` and the ``num_top`` best alternatives (ties: lowest id first)."""
    top = float(logits.max())
    values = logits - (top + float(np.log(np.exp(logits - top).sum())))
    best = np.argsort(-values, kind="stable")[:num_top]
    return TokenLogprobs(
        token_id=token,
        logprob=float(values[token]),
        rank=1 + int((values > values[token]).sum()),
        top=tuple((int(index), float(values[index])) for index in best),
    )
