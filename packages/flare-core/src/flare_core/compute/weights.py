"""Reads one rank's weights and makes them ready: fused, interleaved for rotation, halved where that is exact.

Knows the names that checkpoints use and the form that :mod:`flare_core.compute.layers` wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from flare_core.compute.checkpoint import Checkpoint
from flare_core.compute.collectives import TensorCollectives
from flare_core.compute.half_weights import HalfWeight, half_weight, supports_half_weights
from flare_core.compute.identity import Progress
from flare_core.compute.layers import LayerWeights, Projection, RmsNorm
from flare_core.compute.model_config import ModelConfig
from flare_core.compute.rotary import Rotary, interleave
from flare_core.compute.sharded_model import ShardedModel
from flare_core.compute.tensor_layout import EMBEDDING, FINAL_NORM, HEAD, RankShard, TensorSlice, tensor_slices

__all__ = ["load_model"]

_MAX_HALF_BYTES: Final = 4 << 30
"""Memory that 16-bit copies may take on a rank: the head first, then the layers in order."""


class _Reader:
    """Reads a rank's tensors by short name, in the compute dtype, onto the device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shard: RankShard,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._parts = {part.name: part for part in tensor_slices(checkpoint.config, shard)}
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._num_read = 0

    def read(self, name: str) -> torch.Tensor:
        """The rank's part of ``name``."""
        part: TensorSlice = self._parts[name]
        self._num_read += 1
        if self._progress is not None:
            self._progress("loading weights", self._num_read, len(self._parts))
        return self._checkpoint.read(part).to(device=self._device, dtype=self._dtype)

    def maybe(self, name: str) -> torch.Tensor | None:
        """The rank's part of ``name``, or None where the model has no such tensor."""
        return self.read(name) if name in self._parts else None


def _fold(norm: RmsNorm, projection: Projection) -> tuple[RmsNorm, Projection]:
    """Move the 16-bit copy's power of two from the product to the norm before it: exact, and no operation a row."""
    half = projection.half
    if half is None:
        return norm, projection
    folded = Projection(projection.weight.div_(half.unscale), projection.bias, HalfWeight(half.packed, 1.0))
    return RmsNorm(norm.gain * half.unscale, norm.floor), folded


class _Halver:
    """Adds 16-bit copies to projections, while those copies stay below :data:`_MAX_HALF_BYTES`."""

    def __init__(self, *, is_worth_it: bool) -> None:
        self._left_bytes = _MAX_HALF_BYTES if is_worth_it and supports_half_weights() else 0

    def add(self, projection: Projection) -> Projection:
        """The projection, with a 16-bit copy where there is room for one and it is exact."""
        weight = projection.weight
        size = 2 * weight.numel()
        if not 0 < size <= self._left_bytes:
            return projection
        half = half_weight(weight)
        if half is not None:
            self._left_bytes -= size
        return Projection(weight, projection.bias, half)


def load_model(
    checkpoint: Checkpoint,
    shard: RankShard,
    collectives: TensorCollectives,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> ShardedModel:
    """Read one rank's weights and make them ready. Blocks on the disk.

    Raises:
        CheckpointError: a missing or misshapen tensor.
    """
    config = checkpoint.config
    reader = _Reader(checkpoint, shard, dtype=dtype, device=device, progress=progress)
    embedding = reader.read(EMBEDDING)
    halver = _Halver(is_worth_it=device.type == "cpu" and dtype == torch.float32)
    head = halver.add(Projection(embedding if config.tied else reader.read(HEAD)))
    layers = tuple(
        _load_layer(reader, halver, config, shard, f"model.layers.{index}.") for index in range(config.num_layers)
    )
    return ShardedModel(
        config=config,
        shard=shard,
        collectives=collectives,
        rotary=Rotary.create(config.rope, config.head_dim, device),
        embedding=embedding,
        layers=layers,
        final_norm=RmsNorm.create(reader.read(FINAL_NORM), config.rms_norm_eps),
        head=head,
        is_row_invariant=shard.world_size == 1 and config.head_dim % 16 == 0 and _all_halved(head, layers),
    )


def _all_halved(head: Projection, layers: Sequence[LayerWeights]) -> bool:
    """Whether every product of few rows takes a 16-bit copy."""
    products = [head, *(each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down))]
    return all(product.half is not None for product in products)


def _load_layer(reader: _Reader, halver: _Halver, config: ModelConfig, shard: RankShard, prefix: str) -> LayerWeights:
    attention_norm, qkv = _fold(
        RmsNorm.create(reader.read(prefix + "input_layernorm.weight"), config.rms_norm_eps),
        halver.add(_load_qkv(reader, config, prefix + "self_attn.")),
    )
    mlp_norm, gate_up = _fold(
        RmsNorm.create(reader.read(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps),
        halver.add(_load_stacked(reader, config.mlp_bias, prefix + "mlp.")),
    )
    return LayerWeights(
        attention_norm=attention_norm,
        qkv=qkv,
        head_norm=_load_head_norm(reader, config, shard, prefix + "self_attn."),
        output=halver.add(_load_summed(reader, shard, prefix + "self_attn.o_proj.")),
        mlp_norm=mlp_norm,
        gate_up=gate_up,
        down=halver.add(_load_summed(reader, shard, prefix + "mlp.down_proj.")),
    )


def _load_qkv(reader: _Reader, config: ModelConfig, prefix: str) -> Projection:
    def stacked(kind: str) -> torch.Tensor:
        query, key, value = (reader.read(f"{prefix}{name}_proj.{kind}") for name in ("q", "k", "v"))
        return torch.cat([interleave(query, config.head_dim), interleave(key, config.head_dim), value])

    return Projection(stacked("weight"), stacked("bias") if config.qkv_bias else None)


def _load_stacked(reader: _Reader, has_bias: bool, prefix: str) -> Projection:
    """Gate and up columns, one under the other."""

    def stacked(kind: str) -> torch.Tensor:
        return torch.cat([reader.read(f"{prefix}{name}_proj.{kind}") for name in ("gate", "up")])

    return Projection(stacked("weight"), stacked("bias") if has_bias else None)


def _load_head_norm(reader: _Reader, config: ModelConfig, shard: RankShard, prefix: str) -> RmsNorm | None:
    query, key = reader.maybe(prefix + "q_norm.weight"), reader.maybe(prefix + "k_norm.weight")
    if query is None or key is None:
        return None
    dim = config.head_dim
    rows = [interleave(query, dim)] * len(shard.heads.query) + [interleave(key, dim)] * len(shard.heads.kv)
    return RmsNorm.create(torch.stack(rows), config.rms_norm_eps)


def _load_summed(reader: _Reader, shard: RankShard, prefix: str) -> Projection:
    """A projection whose partial results are summed over ranks: only rank 0 adds the bias."""
    bias = reader.maybe(prefix + "bias")
    return Projection(reader.read(prefix + "weight"), bias if shard.rank == 0 else None)
