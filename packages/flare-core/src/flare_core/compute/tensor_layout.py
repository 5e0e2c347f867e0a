"""Which part of which checkpoint tensor each rank holds, by the tensor's Hugging Face name.

Pure arithmetic over :mod:`flare_core.sharding`; the loader, the package exporter and the model read it alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flare_core.compute.model_config import ModelConfig
from flare_core.sharding import HeadShard, Span, split_heads, split_mlp, split_vocab

__all__ = ["RankShard", "TensorSlice", "rank_shard", "tensor_slices"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The part ``spans`` of the tensor ``name`` of shape ``shape``; one span an axis."""

    name: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def sliced_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(len(span) for span in self.spans)


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's share of a model: heads, MLP columns (possibly none) and vocabulary ids (possibly none)."""

    rank: int
    world_size: int
    heads: HeadShard
    mlp: Span
    vocab: Span
    vocab_spans: tuple[Span, ...]


def rank_shard(config: ModelConfig, rank: int, world_size: int) -> RankShard:
    """What ``rank`` of ``world_size`` holds.

    Raises:
        UsageError: the model's heads cannot be divided over so many ranks.
    """
    vocab_spans = tuple(split_vocab(config.vocab_size, world_size))
    return RankShard(
        rank=rank,
        world_size=world_size,
        heads=split_heads(config.num_heads, config.num_kv_heads, world_size)[rank],
        mlp=split_mlp(config.intermediate_size, world_size)[rank],
        vocab=vocab_spans[rank],
        vocab_spans=vocab_spans,
    )


def tensor_slices(config: ModelConfig, shard: RankShard) -> Iterator[TensorSlice]:
    """Every tensor that the rank needs, in the order of the layers."""
    hidden = Span(0, config.hidden_size)
    yield TensorSlice(EMBEDDING, (config.vocab_size, config.hidden_size), (shard.vocab, hidden))
    for layer in range(config.num_layers):
        yield from _layer_slices(config, shard, f"model.layers.{layer}.")
    yield TensorSlice(FINAL_NORM, (config.hidden_size,), (hidden,))
    if not config.tied:
        yield TensorSlice(HEAD, (config.vocab_size, config.hidden_size), (shard.vocab, hidden))


def _layer_slices(config: ModelConfig, shard: RankShard, prefix: str) -> Iterator[TensorSlice]:
    hidden, dim = Span(0, config.hidden_size), config.head_dim
    query = Span(shard.heads.query.start * dim, shard.heads.query.stop * dim)
    key_value = Span(shard.heads.kv.start * dim, shard.heads.kv.stop * dim)
    yield TensorSlice(prefix + "input_layernorm.weight", (config.hidden_size,), (hidden,))
    for name, heads, span in (
        ("q_proj", config.num_heads, query),
        ("k_proj", config.num_kv_heads, key_value),
        ("v_proj", config.num_kv_heads, key_value),
    ):
        yield TensorSlice(f"{prefix}self_attn.{name}.weight", (heads * dim, config.hidden_size), (span, hidden))
        if config.qkv_bias:
            yield TensorSlice(f"{prefix}self_attn.{name}.bias", (heads * dim,), (span,))
    if config.qk_norm:
        yield TensorSlice(prefix + "self_attn.q_norm.weight", (dim,), (Span(0, dim),))
        yield TensorSlice(prefix + "self_attn.k_norm.weight", (dim,), (Span(0, dim),))
    yield TensorSlice(prefix + "self_attn.o_proj.weight", (config.hidden_size, config.num_heads * dim), (hidden, query))
    if config.o_bias:
        yield TensorSlice(prefix + "self_attn.o_proj.bias", (config.hidden_size,), (hidden,))
    yield TensorSlice(prefix + "post_attention_layernorm.weight", (config.hidden_size,), (hidden,))
    for name in ("gate_proj", "up_proj"):
        full = (config.intermediate_size, config.hidden_size)
        yield TensorSlice(f"{prefix}mlp.{name}.weight", full, (shard.mlp, hidden))
        if config.mlp_bias:
            yield TensorSlice(f"{prefix}mlp.{name}.bias", (config.intermediate_size,), (shard.mlp,))
    yield TensorSlice(
        prefix + "mlp.down_proj.weight", (config.hidden_size, config.intermediate_size), (hidden, shard.mlp)
    )
    if config.mlp_bias:
        yield TensorSlice(prefix + "mlp.down_proj.bias", (config.hidden_size,), (hidden,))
