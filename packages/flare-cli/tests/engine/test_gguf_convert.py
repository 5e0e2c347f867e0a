"""Conversion of a tiny random GGUF file, and of the default model where the user's cache holds it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from flare_cli.gguf_convert import convert_llama_gguf
from flare_cli.model_store import DEFAULT_MODEL, find_default_model

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS, HEAD_DIM = 64, 4, 2, 128, 2, 16
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(gguf_bytes for gguf_bytes in map(chr, range(33, 127)))]
TOKENS = [*WORDS, "Ġ", "ĠĠ", "Ċ", "Ġ7"]
MERGES = ["Ġ Ġ", "Ġ 7"]


def write_gguf(path: Path, *, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A random model with a byte-level tokenizer; returns its tensors by GGUF name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    tensors = random_tensors()
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def random_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each rotary head; Hugging Face keeps them apart."""
    paired = rows.reshape(heads, HEAD_DIM // 2, 2, HIDDEN)
    return paired.swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    root = tmp_path_factory.mktemp("gguf")
    tensors = write_gguf(root / "tiny.gguf")
    directory = root / "model"
    directory.mkdir()
    convert_llama_gguf(root / "tiny.gguf", directory, context_tokens=64)
    return directory, tensors


def test_weights_are_the_tensors_of_the_file_rounded_to_bf16(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, tensors = converted
    weights = load_file(directory / "model.safetensors")
    layer = "model.layers.1.self_attn."
    expected = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        layer + "q_proj.weight": unpermuted(tensors["blk.1.attn_q.weight"], HEADS),
        layer + "k_proj.weight": unpermuted(tensors["blk.1.attn_k.weight"], KV_HEADS),
        layer + "v_proj.weight": tensors["blk.1.attn_v.weight"],
        "model.layers.0.mlp.down_proj.weight": tensors["blk.0.ffn_down.weight"],
    }
    for name, tensor in expected.items():
        assert torch.equal(weights[name], torch.from_numpy(tensor.copy()).to(torch.bfloat16)), name
    assert len(weights) == 2 + 9 * LAYERS
    assert "lm_head.weight" not in weights


def test_the_directory_loads_as_a_plain_model(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, _ = converted
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    assert not hasattr(config, "quantization_config")
    assert config.rope_parameters["rope_theta"] == 10_000.0
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert config.tie_word_embeddings
    assert model(torch.tensor([[1, 5, 9]])).logits.shape == (1, 3, len(TOKENS))


def test_all_ids_that_end_a_text_are_written(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, _ = converted
    assert GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id == [2, 0]


def test_digits_are_split_off_before_the_byte_level_rule(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, _ = converted
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert tokenizer.tokenize("x  77") == ["x", "ĠĠ", "7", "7"]
    assert tokenizer.decode(tokenizer("x  77 y")["input_ids"]) == "x  77 y"


def test_the_chat_template_stands_in_the_tokenizers_config(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, _ = converted
    assert "im_start" in json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    turn = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "<|im_start|>hi<|im_end|>"


def test_the_same_file_gives_the_same_bytes(converted: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    directory, _ = converted
    convert_llama_gguf(directory.parent / "tiny.gguf", tmp_path, context_tokens=64)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (directory / path.name).read_bytes(), path.name


@pytest.mark.skipif(find_default_model() is None, reason="the default model is not in the user's cache: make demo")
def test_the_default_model_knows_the_capital_of_france() -> None:
    directory = find_default_model()
    assert directory is not None
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1]
    assert tokenizer.decode(answer) == " Paris"
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.model_max_length == DEFAULT_MODEL.context_tokens
