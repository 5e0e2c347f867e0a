"""Tiny random checkpoints in Hugging Face form, with a tokenizer and a chat template, for tests of every package.

Importing this loads no torch; making a checkpoint needs ``torch``, ``transformers`` and ``tokenizers``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from string import ascii_lowercase
from typing import Any

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "make_tiny_checkpoint", "make_tokenizer"]

SPECIAL_TOKENS = ("<|start|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""The last ids of the vocabulary, in this order; ``<|end|>`` ends an output."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_TINY: Mapping[str, Any] = {
    "vocab_size": 3100,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
}


def make_tiny_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Write a random model of ``family`` ("llama", "qwen2", "qwen3") with its tokenizer to ``directory``.

    ``overrides`` are fields of the transformers configuration. Biases and norms are random too, so that leaving
    one out shows. The same arguments give the same weights.
    """
    import torch
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    values = dict(_TINY) | overrides
    special = values["vocab_size"] - len(SPECIAL_TOKENS)
    values.setdefault("bos_token_id", special)
    values.setdefault("eos_token_id", special + 1)
    config = getattr(transformers, f"{name}Config")(**values)
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for tensor_name, parameter in model.named_parameters():
                if tensor_name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
                elif "norm" in tensor_name:
                    parameter.normal_(1.0, 0.1)
    finally:
        torch.random.set_rng_state(generator_state)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer(directory, values["vocab_size"])
    return directory


def make_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level BPE whose every id has a text: bytes, pairs and triples of letters, special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {byte: index for index, byte in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    pairs = [(one, two) for one in ascii_lowercase for two in ascii_lowercase]
    triples = [(one + two, three) for one, two in pairs for three in ascii_lowercase]
    for left, right in pairs + triples:
        if len(vocab) == vocab_size - len(SPECIAL_TOKENS):
            break
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
