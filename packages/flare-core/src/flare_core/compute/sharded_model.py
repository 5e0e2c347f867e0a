"""One rank's model: weights made ready from a checkpoint, and the forward pass of all three families.

Knows layers, ranks and rotation; not requests, pages or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_core.compute.attention import AttentionPlan
from flare_core.compute.checkpoint import Checkpoint
from flare_core.compute.collectives import TensorCollectives
from flare_core.compute.identity import Progress
from flare_core.compute.layers import (
    LayerWeights,
    Projection,
    project,
    project_onto,
    rms_norm,
    silu_product,
)
from flare_core.compute.model_config import ModelConfig
from flare_core.compute.rotary import Rotary, interleave, rotate_
from flare_core.compute.tensor_layout import EMBEDDING, FINAL_NORM, HEAD, RankShard, TensorSlice, tensor_slices

__all__ = ["ShardedModel", "load_model"]


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A decoder as one rank computes it. ``embedding`` and ``head`` hold the rank's vocabulary ids only."""

    config: ModelConfig
    shard: RankShard
    collectives: TensorCollectives
    rotary: Rotary
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Projection

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Rows [M, hidden] after the last layer, before the final norm.

        ``token_ids`` [M] int64; ``positions`` [M] float32. Writes the tokens' keys and values through ``plan``.
        """
        rows = self._embed(token_ids)
        rotations = self.rotary.rotations(positions)
        for index, layer in enumerate(self.layers):
            rows = self._attention(rows, index, layer, rotations, plan)
            rows = self._mlp(rows, layer)
        return rows

    def local_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [M, ids of this rank], float32, of rows as :meth:`hidden` gives them."""
        return project(rms_norm(rows, self.final_norm, self.config.rms_norm_eps), self.head).float()

    def gather_logits(self, local: torch.Tensor) -> torch.Tensor:
        """[M, vocabulary] on every rank, equal bit for bit: one collective, none at world size 1."""
        if self.shard.world_size == 1:
            return local
        widths = [len(span) for span in self.shard.vocab_spans]
        padded = F.pad(local, (0, max(widths) - local.shape[1]))
        parts = self.collectives.all_gather(padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.shard.world_size == 1:
            return F.embedding(token_ids, self.embedding)
        span = self.shard.vocab
        rows = self.embedding.new_zeros((len(token_ids), self.config.hidden_size))
        if len(span):
            mine = (token_ids >= span.start) & (token_ids < span.stop)
            local = (token_ids - span.start).clamp_(0, len(span) - 1)
            rows = F.embedding(local, self.embedding) * mine.unsqueeze(1)
        self.collectives.all_reduce_(rows)
        return rows

    def _attention(
        self, rows: torch.Tensor, index: int, layer: LayerWeights, rotations: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        dim = self.config.head_dim
        heads = self.shard.heads
        num_query, num_kv = len(heads.query), len(heads.kv)
        normed = rms_norm(rows, layer.attention_norm, self.config.rms_norm_eps)
        parts = project(normed, layer.qkv).view(rows.shape[0], num_query + 2 * num_kv, dim)
        turned = parts[:, : num_query + num_kv]
        if layer.head_norm is not None:
            turned.copy_(rms_norm(turned, layer.head_norm, self.config.rms_norm_eps))
        rotate_(turned, rotations)
        key_value = parts[:, num_query:].view(rows.shape[0], 2, num_kv, dim)
        attended = plan.attend(index, parts[:, :num_query], key_value)
        return self._sum(rows, attended, layer.output)

    def _mlp(self, rows: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        normed = rms_norm(rows, layer.mlp_norm, self.config.rms_norm_eps)
        return self._sum(rows, silu_product(project(normed, layer.gate_up)), layer.down)

    def _sum(self, residual: torch.Tensor, rows: torch.Tensor, projection: Projection) -> torch.Tensor:
        """The residual plus the projection's partial results of all ranks."""
        if self.shard.world_size == 1:
            return project_onto(residual, rows, projection)
        partial = project(rows, projection)
        self.collectives.all_reduce_(partial)
        return partial.add_(residual)


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
    layers = tuple(_load_layer(reader, config, shard, f"model.layers.{index}.") for index in range(config.num_layers))
    return ShardedModel(
        config=config,
        shard=shard,
        collectives=collectives,
        rotary=Rotary.create(config.rope, config.head_dim, device),
        embedding=embedding,
        layers=layers,
        final_norm=reader.read(FINAL_NORM),
        head=Projection(embedding if config.tied else reader.read(HEAD)),
    )


def _load_layer(reader: _Reader, config: ModelConfig, shard: RankShard, prefix: str) -> LayerWeights:
    dim = config.head_dim
    return LayerWeights(
        attention_norm=reader.read(prefix + "input_layernorm.weight"),
        qkv=_load_qkv(reader, config, prefix + "self_attn."),
        head_norm=_load_head_norm(reader, shard, dim, prefix + "self_attn."),
        output=_load_summed(reader, shard, prefix + "self_attn.o_proj."),
        mlp_norm=reader.read(prefix + "post_attention_layernorm.weight"),
        gate_up=Projection(
            torch.cat([reader.read(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]),
            torch.cat([reader.read(f"{prefix}mlp.{name}_proj.bias") for name in ("gate", "up")])
            if config.mlp_bias
            else None,
        ),
        down=_load_summed(reader, shard, prefix + "mlp.down_proj."),
    )


def _load_qkv(reader: _Reader, config: ModelConfig, prefix: str) -> Projection:
    def stacked(kind: str) -> torch.Tensor:
        query, key, value = (reader.read(f"{prefix}{name}_proj.{kind}") for name in ("q", "k", "v"))
        return torch.cat([interleave(query, config.head_dim), interleave(key, config.head_dim), value])

    return Projection(stacked("weight"), stacked("bias") if config.qkv_bias else None)


def _load_head_norm(reader: _Reader, shard: RankShard, dim: int, prefix: str) -> torch.Tensor | None:
    query, key = reader.maybe(prefix + "q_norm.weight"), reader.maybe(prefix + "k_norm.weight")
    if query is None or key is None:
        return None
    rows = [interleave(query, dim)] * len(shard.heads.query) + [interleave(key, dim)] * len(shard.heads.kv)
    return torch.stack(rows)


def _load_summed(reader: _Reader, shard: RankShard, prefix: str) -> Projection:
    """A projection whose partial results are summed over ranks: only rank 0 adds the bias."""
    bias = reader.maybe(prefix + "bias")
    return Projection(reader.read(prefix + "weight"), bias if shard.rank == 0 else None)
