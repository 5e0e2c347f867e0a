"""Turns a GGUF file of a Llama-shaped model into a Hugging Face directory.

Owns the conversion and what ``transformers`` leaves wrong in it. Reads GGUF only through ``transformers``,
which dequantises with the ``gguf`` package. Does not know where the file comes from or goes to.
The files depend on the GGUF alone, not on the versions of the libraries: two hosts that convert the same
file get the same bytes, hence the same model identity. Imports torch and transformers when called.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

__all__ = ["convert_llama_gguf"]

_CONFIG_KEYS = (
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)
_END_OF_DOCUMENT = "<|endoftext|>"


def convert_llama_gguf(gguf: Path, directory: Path, *, context_tokens: int) -> None:
    """Write ``gguf`` as config.json, generation_config.json, model.safetensors (bf16), tokenizer.json and
    tokenizer_config.json (with the chat template) into the existing ``directory``.

    Blocks for about 20 s and 1.5 GB of memory at 135 M parameters. Raises what transformers raises for a
    file that it cannot read, and ValueError for a model that is not Llama-shaped.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The library reports on standard error and warns about its own defaults; the caller draws the progress.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        source = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = model.config
    if config.model_type != "llama":
        raise ValueError(f"{gguf.name} is a {config.model_type} model; only llama is converted")

    # A model loaded from GGUF refuses save_pretrained ("not serializable"), so the tensors are saved directly.
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _config(config))
    _write_json(directory / "generation_config.json", _generation_config(tokenizer))
    _write_tokenizer(tokenizer, gguf=gguf, directory=directory, context_tokens=context_tokens)


def _config(config: Any) -> dict[str, object]:
    chosen: dict[str, object] = {key: getattr(config, key) for key in _CONFIG_KEYS}
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    return {
        **chosen,
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": rope["rope_theta"],
        "torch_dtype": "bfloat16",
    }


def _generation_config(tokenizer: Any) -> dict[str, object]:
    """All ids that end a text: the end of a chat turn, and the end of a document where the model has one."""
    ends = [tokenizer.eos_token_id]
    document_end = tokenizer.get_vocab().get(_END_OF_DOCUMENT)
    if document_end is not None and document_end not in ends:
        ends.append(document_end)
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _write_tokenizer(tokenizer: Any, *, gguf: Path, directory: Path, context_tokens: int) -> None:
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if _pre_tokenizer_name(gguf) == "smollm":
        # transformers ignores tokenizer.ggml.pre. This one splits every digit off before the byte-level
        # rule; without it "  7" becomes other tokens than the model was trained with.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.save(str(directory / "tokenizer.json"))
    special = ("bos_token", "eos_token", "pad_token", "unk_token")
    _write_json(
        directory / "tokenizer_config.json",
        {
            **{name: getattr(tokenizer, name) for name in special},
            "add_bos_token": False,
            "chat_template": tokenizer.chat_template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context_tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _pre_tokenizer_name(gguf: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
