"""The target over whole padded sequences: the outputs of tapped layers and the rows its head multiplies.

A plain causal pass without pages, which gives the rows that the engine computes token by token. Knows weights, not
requests. For one rank, which holds the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_core.compute.layers import LayerWeights, project, project_onto, rms_norm, silu_product
from flare_core.compute.rotary import rotate_
from flare_core.compute.sharded_model import ShardedModel
from flare_core.errors import UsageError
from flare_spec.dspark.training_data import TrainingBatch
from flare_spec.training.conversations import Conversation, padded

__all__ = ["target_batch", "target_outputs"]


def target_batch(model: ShardedModel, taps: Sequence[int], conversations: Sequence[Conversation]) -> TrainingBatch:
    """``conversations``, padded, with what the target computes of them, on its device; taps in float32."""
    tokens, is_answer = padded(conversations)
    device = model.embedding.device
    tokens = tokens.to(device)
    tapped, rows = target_outputs(model, taps, tokens)
    return TrainingBatch(tokens, is_answer.to(device), tapped.float(), rows)


@torch.no_grad()
def target_outputs(model: ShardedModel, taps: Sequence[int], tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``tokens`` [B, T] int64: outputs of the layers ``taps`` side by side, and rows after the final norm.

    [B, T, taps * hidden] and [B, T, hidden] in the model's dtype. Tap -1 is the embedding's output. What pads a
    sequence on the right changes nothing before it.

    Raises:
        UsageError: a model of which this rank holds a part only.
    """
    if model.shard.world_size != 1:
        raise UsageError(f"training needs the whole target on one rank, not one of {model.shard.world_size}")
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch).float()
    rotations = model.rotary.rotations(positions)
    rows = F.embedding(tokens.flatten(), model.embedding)
    kept = {-1: rows}
    for index, layer in enumerate(model.layers):
        rows = project_onto(rows, _attended(model, layer, rows, rotations, batch), layer.output)
        normed = rms_norm(rows, layer.mlp_norm)
        rows = project_onto(rows, silu_product(project(normed, layer.gate_up)), layer.down)
        kept[index] = rows if index in taps else rows[:0]
    tapped = torch.cat([kept[tap] for tap in taps], dim=1)
    return tapped.view(batch, length, -1), rms_norm(rows, model.final_norm).view(batch, length, -1)


def _attended(
    model: ShardedModel, layer: LayerWeights, rows: torch.Tensor, rotations: torch.Tensor, batch: int
) -> torch.Tensor:
    config = model.config
    num_query, num_kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
    parts = project(rms_norm(rows, layer.attention_norm), layer.qkv).view(len(rows), num_query + 2 * num_kv, dim)
    turned = parts[:, : num_query + num_kv]
    if layer.head_norm is not None:
        turned.copy_(rms_norm(turned, layer.head_norm))
    rotate_(turned, rotations)
    heads = parts.view(batch, -1, num_query + 2 * num_kv, dim).transpose(1, 2)
    query, key, value = torch.split(heads, [num_query, num_kv, num_kv], dim=1)
    group = num_query // num_kv
    output = F.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), is_causal=True
    )
    return output.transpose(1, 2).reshape(len(rows), num_query * dim)
