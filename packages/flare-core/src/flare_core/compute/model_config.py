"""What a model is, read from ``config.json``: the three families, their shapes, and refusals by name.

Owns the reading of configurations. Knows no tensor: importing it loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flare_core.errors import CheckpointError, UnsupportedModel

__all__ = ["ModelConfig", "RopeConfig", "parse_config", "read_config", "read_eos_token_ids"]

FAMILIES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Keys that are read below, each where its meaning is decided.
_READ_KEYS: Final = frozenset(
    {
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings",
        "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling",
        "rope_parameters", "partial_rotary_factor", "layer_types", "original_max_position_embeddings",
        "use_sliding_window", "sliding_window", "eos_token_id", "torch_dtype", "dtype",
    }
)  # fmt: skip

# Keys that say nothing about the next token of a prompt: bookkeeping, training, and defaults of generation.
_HARMLESS_KEYS: Final = frozenset(
    {
        "_name_or_path", "name_or_path", "transformers_version", "transformers.js_config", "use_cache",
        "bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id", "initializer_range",
        "attention_dropout", "hidden_dropout", "max_window_layers", "is_llama_config", "_attn_implementation",
        "attn_implementation", "_attn_implementation_autoset", "return_dict", "return_dict_in_generate",
        "output_hidden_states", "output_attentions", "output_scores", "chunk_size_feed_forward", "id2label",
        "label2id", "problem_type", "finetuning_task", "task_specific_params", "torchscript", "use_bfloat16",
        "cache_implementation", "temperature", "top_k", "top_p", "typical_p", "min_length", "max_length", "do_sample",
        "num_beams", "num_beam_groups", "diversity_penalty", "early_stopping", "length_penalty",
        "num_return_sequences", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "repetition_penalty",
        "bad_words_ids", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "tf_legacy_loss", "prefix",
        "tokenizer_class", "unsloth_version", "unsloth_fixed", "model_max_length",
    }
)  # fmt: skip

# Keys that are harmless with one value only.
_FIXED_KEYS: Final[Mapping[str, object]] = {
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}

_ROPE_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
        }
    ),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: ``kind`` is "default", "linear", "llama3" or "yarn"; unused fields keep their defaults."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One dense decoder of the Llama, Qwen2 or Qwen3 family.

    Attributes:
        family: "llama", "qwen2" or "qwen3".
        num_heads, num_kv_heads, head_dim: attention; ``num_heads`` counts query heads.
        tied: the output head is the embedding.
        qkv_bias, o_bias, mlp_bias: which projections carry a bias.
        qk_norm: queries and keys are normalised per head (Qwen3).
        eos_token_ids: as the config names them; ``generation_config.json`` may name others.
        stored_dtype: dtype of the weights as the config names it, None where it does not.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    stored_dtype: str | None


def read_config(model_dir: Path) -> ModelConfig:
    """The configuration of the model in ``model_dir``.

    Raises:
        CheckpointError: no readable ``config.json``.
        UnsupportedModel: it describes something flare does not implement.
    """
    return parse_config(_read_json(model_dir / "config.json"), str(model_dir / "config.json"))


def read_eos_token_ids(model_dir: Path, config: ModelConfig) -> tuple[int, ...]:
    """Ids that end an output: those of ``generation_config.json``, or of the config where it names none."""
    path = model_dir / "generation_config.json"
    if path.exists():
        named = _token_ids(_read_json(path).get("eos_token_id"))
        if named:
            return named
    return config.eos_token_ids


def parse_config(raw: Mapping[str, Any], origin: str = "config.json") -> ModelConfig:
    """The model that ``raw`` describes; ``origin`` names it in messages.

    Raises:
        UnsupportedModel: an architecture, key or value that flare does not implement; named in the message.
        CheckpointError: a required key is missing or not of its type.
    """
    family = _family(raw, origin)
    _refuse_unknown(raw, origin)
    _refuse_sliding_window(raw, family, origin)
    hidden_act = raw.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise UnsupportedModel(f"{origin}: hidden_act {hidden_act!r} is not supported; only 'silu' is")
    hidden_size = _integer(raw, "hidden_size", origin)
    num_heads = _integer(raw, "num_attention_heads", origin)
    default_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
    head_dim = _integer(raw, "head_dim", origin, default_head_dim)
    if head_dim % 2:
        raise UnsupportedModel(f"{origin}: head_dim {head_dim} is odd; rotary embedding needs an even one")
    attention_bias = bool(raw.get("attention_bias", False))
    max_position = _integer(raw, "max_position_embeddings", origin, 2048 if family == "llama" else 32768)
    return ModelConfig(
        family=family,
        vocab_size=_integer(raw, "vocab_size", origin),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size", origin),
        num_layers=_integer(raw, "num_hidden_layers", origin),
        num_heads=num_heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", origin, num_heads),
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position=max_position,
        rope=_rope(raw, max_position, origin),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
        stored_dtype=raw.get("dtype") or raw.get("torch_dtype"),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a Hugging Face model directory or a package") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def _family(raw: Mapping[str, Any], origin: str) -> str:
    named = raw.get("architectures") or []
    if len(named) != 1 or named[0] not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"{origin}: architecture {named or raw.get('model_type')} is not supported; use {known}")
    family = FAMILIES[named[0]]
    if raw.get("model_type", family) != family:
        raise UnsupportedModel(f"{origin}: model_type {raw['model_type']!r} does not go with {named[0]}")
    return family


def _refuse_unknown(raw: Mapping[str, Any], origin: str) -> None:
    for key, value in raw.items():
        if key in _READ_KEYS or key in _HARMLESS_KEYS or value is None:
            continue
        if key in _FIXED_KEYS and value == _FIXED_KEYS[key]:
            continue
        raise UnsupportedModel(f"{origin}: {key} = {value!r} is not supported and may change the output")


def _refuse_sliding_window(raw: Mapping[str, Any], family: str, origin: str) -> None:
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModel(f"{origin}: layer_types {sorted(kinds)} are not supported; only full_attention is")
    if raw.get("use_sliding_window"):
        raise UnsupportedModel(f"{origin}: use_sliding_window is not supported; only full attention is")
    if raw.get("sliding_window") is not None and family == "llama":
        raise UnsupportedModel(f"{origin}: sliding_window = {raw['sliding_window']} is not supported")


def _rope(raw: Mapping[str, Any], max_position: int, origin: str) -> RopeConfig:
    """Both dialects: ``rope_theta`` and ``rope_scaling`` beside each other, or ``rope_parameters`` with all."""
    given = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    theta = float(given.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0)
    legacy_kind = given.pop("type", None)
    kind = given.pop("rope_type", None) or legacy_kind or "default"
    partial = given.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"{origin}: partial_rotary_factor {partial} is not supported; only 1.0 is")
    if kind not in _ROPE_KEYS:
        known = ", ".join(_ROPE_KEYS)
        raise UnsupportedModel(f"{origin}: rope type {kind!r} is not supported; use {known}")
    for key, value in given.items():
        if key not in _ROPE_KEYS[kind] and value is not None:
            raise UnsupportedModel(f"{origin}: rope parameter {key} = {value!r} is not supported with type {kind!r}")
    if kind == "default":
        return RopeConfig(kind, theta)
    original = raw.get("original_max_position_embeddings") or given.pop("original_max_position_embeddings", None)
    original_max_position = int(original or max_position)
    if given.get("factor") is None:
        if kind != "yarn":
            raise CheckpointError(f"{origin}: rope type {kind!r} needs a factor")
        given["factor"] = max_position / original_max_position
    given.pop("original_max_position_embeddings", None)
    values = {key: value for key, value in given.items() if value is not None}
    return RopeConfig(kind, theta, original_max_position=original_max_position, **values)


def _integer(raw: Mapping[str, Any], key: str, origin: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{origin}: {key} must be a positive integer, not {value!r}")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(int(item) for item in value)
    return ()
