"""Configurations: what is read, and what is refused by its name."""

from __future__ import annotations

import json

import pytest

from flare_core.compute.model_config import parse_config, read_config, read_eos_token_ids
from flare_core.errors import CheckpointError, UnsupportedModel

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def config(**changes):
    return parse_config({key: value for key, value in (LLAMA | changes).items() if value != "absent"})


def test_a_llama_is_read_with_its_defaults():
    parsed = config(rope_theta=500000.0)
    assert (parsed.family, parsed.head_dim, parsed.num_kv_heads) == ("llama", 64, 2)
    assert (parsed.tied, parsed.qkv_bias, parsed.o_bias, parsed.mlp_bias, parsed.qk_norm) == (False,) * 5
    assert (parsed.rope.kind, parsed.rope.theta) == ("default", 500000.0)
    assert config(num_key_value_heads="absent").num_kv_heads == 8


def test_families_differ_in_biases_and_head_norms():
    qwen2 = config(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    qwen3 = config(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


def test_both_dialects_of_rope_say_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    old = config(rope_theta=1e6, rope_scaling={"rope_type": "llama3"} | scaling)
    older = config(rope_theta=1e6, rope_scaling={"type": "llama3"} | scaling)
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e6} | scaling)
    assert old.rope == new.rope == older.rope


def test_yarn_derives_its_factor_from_the_lengths_where_none_is_given():
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    assert config(rope_parameters=rope).rope.factor == 4.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": []}, "llama"),
        ({"model_type": "mistral"}, "mistral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"sliding_window": 4096}, "sliding_window"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True},
            "use_sliding_window",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 63}, "head_dim"),
        ({"brand_new_switch": True}, "brand_new_switch"),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": "absent"}, "vocab_size"),
        ({"hidden_size": "512"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ],
)
def test_a_missing_or_wrong_value_is_named(changes, named):
    with pytest.raises(CheckpointError, match=named):
        config(**changes)


def test_harmless_keys_and_nulls_are_allowed():
    parsed = config(
        transformers_version="5.0", use_cache=False, unknown=None, rope_interleaved=False, use_sliding_window=False
    )
    assert parsed.num_layers == 4


def test_eos_ids_come_from_the_generation_config_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    parsed = read_config(tmp_path)
    assert read_eos_token_ids(tmp_path, parsed) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_eos_token_ids(tmp_path, parsed) == (7, 9)


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_an_unreadable_config_is_a_checkpoint_error(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)
