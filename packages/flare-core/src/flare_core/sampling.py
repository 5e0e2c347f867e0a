"""How the tokens of one request are chosen: the values that travel in a step plan to every rank."""

from __future__ import annotations

import hashlib

import msgspec

__all__ = ["MAX_LOGPROBS", "SamplingParams", "choice_seed"]

MAX_LOGPROBS = 20
"""Most alternatives for which log-probabilities are returned."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """Final values; defaults of the model and the API are applied before.

    Order of application: logit_bias, penalties, (forbidden ids of ``min_tokens``), temperature, min-p, top-k, top-p;
    then Gumbel-max with Philox noise over (seed, position, vocabulary id). Ties: lowest id. Log-probabilities are
    of the raw distribution, before all of that.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off. top_p, min_p: 1 and 0 are off.
        seed: 64 bits, always set (an unseeded request gets random bits).
        logprobs: number of alternatives per output token, 0..20, or None for no log-probabilities at all.
        prompt_logprobs: the same for prompt tokens; such a request reads no cache.
        max_tokens: output tokens at most. min_tokens: ``stop_token_ids`` are forbidden before.
        stop_token_ids: ids that end the output (all EOS ids and the request's own), empty with ignore_eos.
        logit_bias: (token id, added value) pairs.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


def choice_seed(seed: int, choice: int) -> int:
    """Philox key of choice ``choice`` (of ``n``) of a request with ``seed``; choice 0 is the seed itself."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(b"flare/choice/1" + seed.to_bytes(8, "little") + choice.to_bytes(4, "little"))
    return int.from_bytes(digest.digest()[:8], "little")
