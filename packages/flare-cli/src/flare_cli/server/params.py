"""From a checked body to final sampling values: defaults of the model and the API, limits of the server.

Pure but for the random bits of an unseeded request, which the caller passes in. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flare_cli.server.bodies import SamplingBody
from flare_cli.server.model import Limits, ServedModel
from flare_core.errors import RequestError
from flare_core.sampling import SamplingParams

__all__ = [
    "DEFAULT_MODEL_NAME",
    "check_model_name",
    "check_token_ids",
    "max_tokens_field",
    "num_choices",
    "sampling_params",
    "stop_strings",
]

DEFAULT_MODEL_NAME = "default"
"""Names whatever model is served."""

_SEED_MASK = (1 << 64) - 1


def check_model_name(name: str | None, model: ServedModel) -> None:
    """Raises ``RequestError`` (404) unless ``name`` is the served model's, absent, or "default"."""
    if name not in {None, DEFAULT_MODEL_NAME, model.name}:
        msg = f"the model {name!r} does not exist here; this server has {model.name!r}"
        raise RequestError(msg, param="model", status=404, code="model_not_found")


def num_choices(body: SamplingBody, num_prompts: int, limits: Limits) -> int:
    """``n``, within the limits; raises ``RequestError``."""
    n = body.n or 1
    if n > limits.max_n:
        msg = f"n: {n} is more than this server's limit of {limits.max_n}"
        raise RequestError(msg, param="n")
    if n * num_prompts > limits.max_choices:
        msg = f"{num_prompts} prompts with n {n} are more than this server's limit of {limits.max_choices} outputs"
        raise RequestError(msg, param="prompt")
    return n


def stop_strings(body: SamplingBody, limits: Limits) -> tuple[str, ...]:
    """The stop strings, within the limits; raises ``RequestError``."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > limits.max_stops:
        msg = f"stop: {len(stops)} strings are more than this server's limit of {limits.max_stops}"
        raise RequestError(msg, param="stop")
    if any(not stop or len(stop) > limits.max_stop_chars for stop in stops):
        msg = f"stop: a stop string must have 1 to {limits.max_stop_chars} characters"
        raise RequestError(msg, param="stop")
    return stops


def check_token_ids(token_ids: Sequence[int], model: ServedModel, *, param: str) -> None:
    """Raises ``RequestError`` for an id that the model does not have."""
    if token_ids and max(token_ids) >= model.vocab_size:
        msg = f"{param}: token id {max(token_ids)} is not below the vocabulary's {model.vocab_size}"
        raise RequestError(msg, param=param)


def sampling_params(
    body: SamplingBody,
    model: ServedModel,
    limits: Limits,
    *,
    num_prompt_tokens: int,
    prompt_field: str,
    default_max_tokens: int | None,
    logprobs: int | None,
    random_seed: int,
) -> SamplingParams:
    """Final values for a prompt of ``num_prompt_tokens``, which the body has in ``prompt_field``.

    ``default_max_tokens`` is the API's where the body has none; None: what the context leaves.

    Raises:
        RequestError: the prompt and output do not fit the context, or a value over a limit.
    """
    defaults = model.defaults
    _check_room(model, num_prompt_tokens, prompt_field)
    max_tokens = _max_tokens(body, model, limits, num_prompt_tokens, default_max_tokens)
    stop_ids = tuple(body.stop_token_ids or ())
    check_token_ids(stop_ids, model, param="stop_token_ids")
    eos = () if body.ignore_eos else defaults.eos_token_ids
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        msg = f"min_tokens: {min_tokens} is more than the {max_tokens} output tokens allowed"
        raise RequestError(msg, param="min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=random_seed if body.seed is None else body.seed & _SEED_MASK,
        temperature=_or(body.temperature, defaults.temperature),
        top_k=max(0, _or(body.top_k, defaults.top_k)),
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(body, model, limits),
        min_tokens=min_tokens,
        stop_token_ids=tuple(sorted({*eos, *stop_ids})),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def max_tokens_field(body: SamplingBody) -> str:
    """Which of its two names the body uses for the limit of output tokens."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _check_room(model: ServedModel, num_prompt_tokens: int, prompt_field: str) -> None:
    if num_prompt_tokens >= model.max_model_len:
        msg = (
            f"the prompt has {num_prompt_tokens} tokens; this model's context is {model.max_model_len} tokens, and "
            "at least one of them must be left for output"
        )
        raise RequestError(msg, param=prompt_field, code="context_length_exceeded")


def _max_tokens(
    body: SamplingBody, model: ServedModel, limits: Limits, num_prompt_tokens: int, default: int | None
) -> int:
    room = model.max_model_len - num_prompt_tokens
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    name = max_tokens_field(body)
    most = limits.max_output_tokens
    if asked is None:
        return min(value for value in (room, default, most) if value is not None)
    if most is not None and asked > most:
        msg = f"{name}: {asked} is more than this server's limit of {most}"
        raise RequestError(msg, param=name)
    if asked > room:
        msg = (
            f"{name}: {num_prompt_tokens} prompt tokens and {asked} output tokens are more than this model's context "
            f"of {model.max_model_len} tokens"
        )
        raise RequestError(msg, param=name, code="context_length_exceeded")
    return asked


def _logit_bias(body: SamplingBody, model: ServedModel, limits: Limits) -> tuple[tuple[int, float], ...]:
    entries = body.logit_bias or {}
    if len(entries) > limits.max_logit_bias:
        msg = f"logit_bias: {len(entries)} entries are more than this server's limit of {limits.max_logit_bias}"
        raise RequestError(msg, param="logit_bias")
    pairs: list[tuple[int, float]] = []
    for key, value in entries.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10 or int(key) >= model.vocab_size:
            msg = f"logit_bias: {key[:40]!r} is not a token id below {model.vocab_size}"
            raise RequestError(msg, param="logit_bias")
        pairs.append((int(key), value))
    return tuple(sorted(pairs))
