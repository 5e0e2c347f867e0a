"""The dialects in which draft checkpoints write their ``config.json``, brought to one set of keys.

Owns which key of which dialect means what, and which keys are refused outright. Does not judge values. Loads no torch.

* flat (DeepSpec): keys of the drafter beside those of its decoder;
* bundled (DeepSeek-V4): the same with the prefix ``dspark_``; recognised by any such key;
* nested (z-lab, ModelOpt): some of them inside ``dflash_config`` or ``dspark_config``;
* speculators: the decoder inside ``transformer_layer_config``, taps as ``aux_hidden_state_layer_ids``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flare_core.errors import CheckpointError, UnsupportedModel

__all__ = ["Dialect", "DraftKeys", "Given", "split_keys"]


class Dialect(enum.StrEnum):
    """How a draft configuration is written."""

    FLAT = "flat"
    BUNDLED = "bundled"
    NESTED = "nested"
    SPECULATORS = "speculators"


@dataclass(frozen=True, slots=True)
class Given:
    """A value and the key it was written under, for messages."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class DraftKeys:
    """A configuration taken apart.

    Attributes:
        architecture: as written, or what ``speculators_model_type`` stands for.
        values: what concerns drafting, by the flat dialect's names.
        decoder: the rest, which describes the drafter's decoder.
    """

    dialect: Dialect
    architecture: str
    values: Mapping[str, Given]
    decoder: Mapping[str, Any]

    def written(self, name: str) -> str:
        """How this dialect writes the flat dialect's ``name``."""
        names = {value: key for key, value in _BUNDLED.items()} if self.dialect is Dialect.BUNDLED else {}
        return names.get(name, name)


_FLAT: Final = {
    name: name
    for name in (
        "block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type",
        "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor", "num_target_layers",
        "draft_vocab_size", "target_hidden_size", "causal", "is_causal", "shift_label", "projector_type",
    )
}  # fmt: skip
_SPECULATORS: Final = _FLAT | {"aux_hidden_state_layer_ids": "aux_hidden_state_layer_ids"}
_BUNDLED: Final = {
    "dspark_block_size": "block_size",
    "dspark_noise_token_id": "mask_token_id",
    "dspark_target_layer_ids": "target_layer_ids",
    "dspark_markov_rank": "markov_rank",
    "dspark_markov_head_type": "markov_head_type",
    "num_target_layers": "num_target_layers",
}
_SECTIONS: Final = ("dflash_config", "dspark_config")
_DECODER: Final = "transformer_layer_config"

# Keys of training and bookkeeping: they say nothing about what a loaded drafter computes.
_HARMLESS: Final = frozenset(
    {
        "num_anchors", "auto_map", "speculators_version", "speculators_config", "speculators_model_type",
        "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma", "sliding_window_non_causal",
        "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start", "lambda_base_decay_ratio", "auf",
        "has_no_defaults_at_init",
    }
)  # fmt: skip

# What speculators writes beside the decoder's own section.
_BESIDE_DECODER: Final = frozenset(
    {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings"}
)

_DFLASH2: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

_REFUSED: Final[Mapping[str, str]] = {
    "Gemma4DSparkModel": "its norms, embedding scale and soft-capped logits are not implemented",
    "DFlash2DraftModel": "its convolutions and candidate selector are not implemented",
    "DeepseekV4ForCausalLM": "its draft stages (mHC streams, MoE) are not implemented",
    "DeepseekV41ForCausalLM": "its draft stages (mHC streams, MoE) are not implemented",
}

_METHODS: Final[Mapping[str, str]] = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}


def split_keys(raw: Mapping[str, Any], origin: str) -> DraftKeys:
    """Take ``raw`` apart; ``origin`` names the file in messages.

    Raises:
        UnsupportedModel: an architecture or a key that changes what is drafted and is not implemented.
        CheckpointError: a key given twice with different values, or a section that is no object.
    """
    dialect = _dialect(raw)
    architecture = _architecture(raw, origin)
    _refuse(raw, origin)
    names = {Dialect.BUNDLED: _BUNDLED, Dialect.SPECULATORS: _SPECULATORS}.get(dialect, _FLAT)
    values: dict[str, Given] = {}
    decoder: dict[str, Any] = {}
    for key, value in raw.items():
        if key in names:
            _put(values, names[key], Given(key, value), origin)
        elif dialect is Dialect.BUNDLED and key.startswith("dspark_"):
            raise UnsupportedModel(f"{origin}: {key} = {value!r} is not supported; use {', '.join(_BUNDLED)}")
        elif key not in _HARMLESS and key not in _SECTIONS:
            decoder[key] = value
    if dialect is Dialect.SPECULATORS:
        decoder = _decoder_section(decoder, origin)
    for section in _SECTIONS:
        for key, value in _section(raw, section, origin).items():
            _put_nested(values, section, key, value, origin)
    return DraftKeys(dialect, architecture, values, decoder)


def _refuse(raw: Mapping[str, Any], origin: str) -> None:
    for key in ("hc_mult", "n_routed_experts", "dspark_n_routed_experts", "quantization_config"):
        if raw.get(key):
            raise UnsupportedModel(
                f"{origin}: {key} = {raw[key]!r} is not supported in a drafter; use a dense bf16 one"
            )


def _section(raw: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{origin}: {key} must be an object, not {value!r}")
    return value


def _decoder_section(beside: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The decoder as speculators writes it; nothing that matters may stand ``beside`` it."""
    for key, value in beside.items():
        if key not in _BESIDE_DECODER and key != _DECODER and value is not None:
            raise UnsupportedModel(f"{origin}: {key} = {value!r} is not supported and may change what is drafted")
    return dict(_section(beside, _DECODER, origin))


def _dialect(raw: Mapping[str, Any]) -> Dialect:
    if "speculators_model_type" in raw:
        return Dialect.SPECULATORS
    if any(section in raw for section in _SECTIONS):
        return Dialect.NESTED
    if any(key.startswith("dspark_") for key in raw):
        return Dialect.BUNDLED
    return Dialect.FLAT


def _architecture(raw: Mapping[str, Any], origin: str) -> str:
    method = raw.get("speculators_model_type")
    if method is not None:
        if method not in _METHODS:
            known = " or ".join(_METHODS)
            raise UnsupportedModel(f"{origin}: speculators_model_type {method!r} is no block drafter; use {known}")
        return _METHODS[method]
    named = raw.get("architectures") or []
    if len(named) != 1:
        raise UnsupportedModel(f"{origin}: architectures must name one drafter, such as Qwen3DSparkModel, not {named}")
    architecture = str(named[0])
    if architecture in _REFUSED:
        raise UnsupportedModel(f"{origin}: architecture {architecture} is not supported: {_REFUSED[architecture]}")
    return architecture


def _put(values: dict[str, Given], name: str, given: Given, origin: str) -> None:
    """Add a value; None says nothing, and two keys for one thing must agree."""
    if given.value is None:
        return
    other = values.get(name)
    if other is not None and other.value != given.value:
        raise CheckpointError(
            f"{origin}: {other.key} = {other.value!r} contradicts {given.key} = {given.value!r}; remove the wrong one"
        )
    values[name] = given


def _put_nested(values: dict[str, Given], section: str, key: str, value: Any, origin: str) -> None:
    written = f"{section}.{key}"
    if key in _DFLASH2:
        raise UnsupportedModel(f"{origin}: {written} = {value!r} belongs to DFlash2, which is not implemented")
    if key in _FLAT:
        _put(values, key, Given(written, value), origin)
    elif key not in _HARMLESS and value is not None:
        raise UnsupportedModel(f"{origin}: {written} = {value!r} is not supported and may change what is drafted")
