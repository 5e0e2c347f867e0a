"""Names and shapes of a draft checkpoint's tensors, as DeepSpec publishes them. Pure: loads no torch.

Reader, writer and test checkpoints go by this one table, so that a name is spelled once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from flare_spec.dspark.config import Confidence, DraftConfig, MarkovKind
from flare_spec.dspark.dialects import Dialect

__all__ = ["ALIASED", "draft_tensors", "is_aliased", "optional_tensors"]

ALIASED: Final = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's embedding and head, [vocabulary, hidden]: not read, the target's own are used."""


def is_aliased(name: str) -> bool:
    """Whether a checkpoint may hold the tensor without its being read: the target has it, or it is computed."""
    return name in ALIASED or name.startswith("rotary_emb.")


def draft_tensors(config: DraftConfig) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every tensor that is read; linear weights are [out, in], Markov weights [vocabulary, rank]."""
    return dict(_tensors(config))


def optional_tensors(config: DraftConfig) -> frozenset[str]:
    """Tensors of :func:`draft_tensors` that may be missing: bundled drafters have no bias on their confidence."""
    return frozenset({"confidence_head.proj.bias"} if config.dialect is Dialect.BUNDLED else ())


def _tensors(config: DraftConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    decoder, rank = config.decoder, config.markov_rank
    hidden = decoder.hidden_size
    yield "fc.weight", (hidden, len(config.taps) * hidden)
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    for layer in range(decoder.num_layers):
        yield from _layer(config, f"layers.{layer}.")
    if config.markov is not MarkovKind.NONE:
        yield "markov_head.markov_w1.weight", (decoder.vocab_size, rank)
        yield "markov_head.markov_w2.weight", (decoder.vocab_size, rank)
    if config.markov is MarkovKind.GATED:
        yield "markov_head.gate_proj.weight", (rank, hidden + rank)
        yield "markov_head.gate_proj.bias", (rank,)
    if config.markov is MarkovKind.RNN:
        yield "markov_head.joint_proj.weight", (3 * rank, 2 * rank + hidden)
        yield "markov_head.joint_proj.bias", (3 * rank,)
    if config.confidence is not Confidence.NONE:
        yield "confidence_head.proj.weight", (1, config.confidence_width)
        yield "confidence_head.proj.bias", (1,)


def _layer(config: DraftConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    decoder = config.decoder
    hidden, dim = decoder.hidden_size, decoder.head_dim
    query, key_value, columns = decoder.num_heads * dim, decoder.num_kv_heads * dim, decoder.intermediate_size
    yield prefix + "input_layernorm.weight", (hidden,)
    for name, out, into, has_bias in (
        ("q_proj", query, hidden, decoder.qkv_bias),
        ("k_proj", key_value, hidden, decoder.qkv_bias),
        ("v_proj", key_value, hidden, decoder.qkv_bias),
        ("o_proj", hidden, query, decoder.o_bias),
    ):
        yield f"{prefix}self_attn.{name}.weight", (out, into)
        if has_bias:
            yield f"{prefix}self_attn.{name}.bias", (out,)
    yield prefix + "self_attn.q_norm.weight", (dim,)
    yield prefix + "self_attn.k_norm.weight", (dim,)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield prefix + "mlp.gate_proj.weight", (columns, hidden)
    yield prefix + "mlp.up_proj.weight", (columns, hidden)
    yield prefix + "mlp.down_proj.weight", (hidden, columns)
