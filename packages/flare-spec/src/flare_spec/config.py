"""What ``--speculative-config`` says: a method and its settings, as JSON with vLLM's names where it has them. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from flare_core.errors import UsageError

__all__ = ["MAX_DRAFTS", "SpeculativeConfig", "parse_speculative_config"]

MAX_DRAFTS = 31
"""A step verifies 32 rows at most: with more, products are bound by arithmetic and drafts no longer come for free."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to draft.

    Attributes:
        method: ``ngram``: what followed the last tokens before, in the prompt or the output; ``suffix``: what followed
            them most often, in this and in earlier requests; ``dspark`` and ``dflash``: a block drafter's checkpoint.
        num_speculative_tokens: drafts of a sequence in a step, at most; None: 5, or what a drafter was trained for.
        rejection_sample_method: ``coupled``: a draft is kept where sampling would choose it anyway, and texts are those
            without drafts; ``standard``: by rejection sampling, which keeps more and has the same distribution.
        model: directory of the drafter's checkpoint (dspark, dflash); without one dspark takes the packaged drafter,
            made for the default model.
        confidence_threshold: drafts end before the first that the drafter is less sure of (dspark with such a head).
        prompt_lookup_max, prompt_lookup_min: tokens that must be equal, tried from the longest down (ngram).
        suffix_decoding_max_tree_depth: tokens that are compared at most (suffix).
        suffix_decoding_max_cached_requests: earlier outputs that are remembered, whoever asked; how many drafts are
            right then tells one tenant of another's answers, so that by default there are none (suffix).
        suffix_decoding_max_spec_factor: drafts for each token that was equal, at most (suffix).
        suffix_decoding_min_token_prob: drafts less likely than this, by what was seen, are not made (suffix).
    """

    method: Literal["ngram", "suffix", "dspark", "dflash"]
    num_speculative_tokens: int | None = None
    rejection_sample_method: Literal["coupled", "standard"] = "coupled"
    model: str | None = None
    confidence_threshold: float = 0.0
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 0
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The settings in ``text``.

    Raises:
        UsageError: no JSON object of this kind, or values that do not go together; names the key and the remedy.
    """
    try:
        config = msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.DecodeError as error:
        msg = f'--speculative-config {text!r}: {error}; give for example \'{{"method": "ngram"}}\''
        raise UsageError(msg) from None
    _check(config)
    return config


def _check(config: SpeculativeConfig) -> None:
    is_block = config.method in {"dspark", "dflash"}
    if config.method == "dflash" and config.model is None:
        msg = '--speculative-config: "dflash" needs "model", the directory of a drafter\'s checkpoint'
        raise UsageError(msg)
    if not is_block and config.model is not None:
        msg = f'--speculative-config: "{config.method}" drafts without a model; leave "model" out'
        raise UsageError(msg)
    bounds: dict[str, tuple[float, float]] = {
        "confidence_threshold": (0.0, 1.0),
        "num_speculative_tokens": (1, MAX_DRAFTS),
        "prompt_lookup_min": (1, 64),
        "prompt_lookup_max": (config.prompt_lookup_min, 64),
        "suffix_decoding_max_tree_depth": (2, 64),
        "suffix_decoding_max_cached_requests": (0, 100_000),
        "suffix_decoding_max_spec_factor": (0.1, 16.0),
        "suffix_decoding_min_token_prob": (0.0, 1.0),
    }
    for name, (least, most) in bounds.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            msg = f"--speculative-config: {name} is {value}; it must be from {least:g} to {most:g}"
            raise UsageError(msg)
