"""Draft checkpoints: published names load, everything else is refused by file and tensor."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from flare_core.compute.model_config import parse_config
from flare_core.errors import CheckpointError
from flare_spec.dspark.testing import flat_draft_config, make_draft_checkpoint
from flare_spec.dspark.weights import load_block_draft

TARGET = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
)


def load(directory):
    return load_block_draft(directory, TARGET, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def directory(tmp_path):
    return make_draft_checkpoint(tmp_path / "draft", TARGET, flat_draft_config(TARGET))


def rewritten(directory, change):
    """The checkpoint with ``change`` applied to its tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_published_names_and_shapes_load_whatever_the_markov_head(tmp_path, kind):
    raw = flat_draft_config(TARGET, markov_head_type=kind)
    draft = load(make_draft_checkpoint(tmp_path, TARGET, raw, dtype="bfloat16"))
    assert draft.markov.kind == kind
    assert (draft.markov.mixer is None) == (kind == "vanilla")
    assert draft.confidence.reads_markov


def test_a_drafter_without_heads_loads_without_them(tmp_path):
    raw = flat_draft_config(TARGET, markov_rank=0, markov_head_type=None, enable_confidence_head=False)
    draft = load(make_draft_checkpoint(tmp_path, TARGET, raw))
    assert draft.markov is None
    assert draft.confidence is None


def test_markov_rows_are_rounded_to_bfloat16_whatever_they_are_stored_in(directory):
    stored = load_file(directory / "model.safetensors")["markov_head.markov_w2.weight"]
    assert torch.equal(load(directory).markov.w2, stored.bfloat16().float())


def test_copies_of_the_targets_embedding_and_head_need_not_be_there(directory):
    def drop(tensors):
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
        tensors["rotary_emb.inv_freq"] = torch.ones(8)

    load(rewritten(directory, drop))


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_norm.weight", "confidence_head.proj.bias"])
def test_a_missing_tensor_is_named(directory, name):
    rewritten(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"{directory} has no tensor {name}"):
        load(directory)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layers.2.input_layernorm.weight", "config.json knows nothing of it"),
        ("markov_head.gate_proj.weight", "config.json knows nothing of it"),
        ("layers.0.attention_conv.base_kernel", "config.json knows nothing of it"),
        ("model.fc.weight", "config.json knows nothing of it"),
        ("d2t", "reduced vocabulary"),
    ],
)
def test_a_surplus_tensor_is_named(directory, name, reason):
    rewritten(directory, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=f"{name} .*{reason}"):
        load(directory)


@pytest.mark.parametrize("name", ["fc.weight", "embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight"])
def test_a_misshapen_tensor_is_named_with_both_shapes(directory, name):
    def cut(tensors):
        tensors[name] = tensors[name][:-1].contiguous()

    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \(\d+, \d+\), not \(\d+, \d+\)"):
        load(rewritten(directory, cut))


def test_quantised_tensors_are_refused(directory):
    def quantise(tensors):
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)

    with pytest.raises(CheckpointError, match=r"fc.weight holds F8_E4M3; only F32, BF16 and F16 do"):
        load(rewritten(directory, quantise))


def test_a_bundled_drafter_has_a_confidence_head_if_it_has_the_tensor(directory):
    raw = json.loads((directory / "config.json").read_text())
    names = {
        "block_size": "dspark_block_size",
        "mask_token_id": "dspark_noise_token_id",
        "target_layer_ids": "dspark_target_layer_ids",
        "markov_rank": "dspark_markov_rank",
    }
    dropped = ("markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    bundled = {names.get(key, key): value for key, value in raw.items() if key not in dropped}
    (directory / "config.json").write_text(json.dumps(bundled))
    rewritten(directory, lambda tensors: tensors.pop("confidence_head.proj.bias"))
    draft = load(directory)
    assert draft.confidence.reads_markov
    assert draft.confidence.projection.bias is None
    rewritten(directory, lambda tensors: tensors.pop("confidence_head.proj.weight"))
    assert load(directory).confidence is None


def test_a_directory_without_a_configuration_is_named(directory):
    (directory / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no JSON object"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match="give the directory of a draft checkpoint"):
        load(directory)
