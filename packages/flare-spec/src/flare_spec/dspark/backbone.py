"""The drafter's layers: a block of an anchor and masks, attending to itself and to context injected from the target.

Knows features of the target's layers, blocks and contexts; not vocabularies, sampling or requests. Sources: DFlash
(context features injected as keys and values) and DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_core.compute.layers import (
    LayerWeights,
    Projection,
    RmsNorm,
    project,
    project_onto,
    rms_norm,
    silu_product,
)
from flare_core.compute.rotary import Rotary, rotate_
from flare_spec.dspark.config import DraftConfig
from flare_spec.dspark.context import ContextStore

__all__ = ["Backbone"]


@dataclass(frozen=True, slots=True)
class Backbone:
    """The layers of one drafter, whole on every rank; rows are in the dtype of its weights.

    Attributes:
        fuse: [hidden, taps * hidden], from the tapped outputs side by side to one context row.
        context_norm: over [hidden], after ``fuse``.
        layers: as the target's layers are held; queries and keys interleaved for rotation.
        final_norm: before the target's head and before the confidence head.
    """

    config: DraftConfig
    rotary: Rotary
    fuse: Projection
    context_norm: RmsNorm
    layers: tuple[LayerWeights, ...]
    final_norm: RmsNorm

    def new_context(self, *, first: int = 0) -> ContextStore:
        """An empty context that begins at position ``first``."""
        weight = self.fuse.weight
        return ContextStore.create(self.config.decoder, dtype=weight.dtype, device=weight.device, first=first)

    def context_rows(self, taps: torch.Tensor) -> torch.Tensor:
        """Context rows [M, hidden] of ``taps`` [M, taps * hidden], the outputs of the tapped layers side by side.

        Row by row: this is what is kept of a position, everything else is computed from it.
        """
        return rms_norm(project(taps, self.fuse), self.context_norm)

    def key_value(self, context: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys and values [layers, M, 2, KV heads, D] of context rows [M, hidden] at ``positions`` [M] (float32).

        The drafter's layers never change a context row: a position's keys and values depend on nothing else.
        """
        rotations = self.rotary.rotations(positions)
        return torch.stack([self._context_key_value(context, layer, rotations) for layer in self.layers])

    def extend(self, store: ContextStore, context: torch.Tensor) -> None:
        """Append the context rows [M, hidden] of the positions from ``store.stop`` on."""
        if len(context):
            positions = torch.arange(store.stop, store.stop + len(context), device=context.device)
            store.append(self.key_value(context, positions.float()))

    def block_ids(self, anchors: torch.Tensor) -> torch.Tensor:
        """Input ids [B, slots] of a block for each of ``anchors`` [B] int64: the anchor, then masks."""
        ids = anchors.new_full((len(anchors), self.config.num_slots), self.config.mask_token_id)
        ids[:, 0] = anchors
        return ids

    def hidden(self, embedded: torch.Tensor, contexts: Sequence[ContextStore]) -> torch.Tensor:
        """Normed rows [B, gamma, hidden] for the head: row j is about position ``start + j + 1``, start the anchor's.

        ``embedded`` [B, slots, hidden] is the target's embedding of :meth:`block_ids`; block b's anchor stands at
        ``contexts[b].stop``, the first position that the context does not hold. All slots see each other and the
        whole context. The contexts are as before afterwards.
        """
        batch, slots, hidden = embedded.shape
        shape = (batch, slots)
        offsets = torch.arange(slots, device=embedded.device)
        starts = torch.tensor([store.stop for store in contexts], device=embedded.device)
        rotations = self.rotary.rotations((starts.unsqueeze(1) + offsets).flatten().float())
        rows = embedded.reshape(batch * slots, hidden)
        for index, layer in enumerate(self.layers):
            query, key_value = self._query_key_value(rows, layer, rotations)
            parts = zip(
                contexts,
                query.view(*shape, *query.shape[1:]),
                key_value.view(*shape, *key_value.shape[1:]),
                strict=True,
            )
            attended = [_attend(each, *store.with_block(index, own)) for store, each, own in parts]
            rows = project_onto(rows, torch.cat(attended), layer.output)
            normed = rms_norm(rows, layer.mlp_norm)
            rows = project_onto(rows, silu_product(project(normed, layer.gate_up)), layer.down)
        first = slots - self.config.gamma  # slot 0 predicts nothing where a mask predicts its own position
        return rms_norm(rows.view(batch, slots, hidden)[:, first:], self.final_norm)

    def _context_key_value(self, context: torch.Tensor, layer: LayerWeights, rotations: torch.Tensor) -> torch.Tensor:
        """[M, 2, KV heads, D]: the projections and the key norm that a block's tokens take, without any layer norm."""
        decoder = self.config.decoder
        first = decoder.num_heads * decoder.head_dim
        bias = layer.qkv.bias
        own = Projection(layer.qkv.weight[first:], None if bias is None else bias[first:])
        key_value = project(context, own).view(len(context), 2, decoder.num_kv_heads, decoder.head_dim)
        self._turn_(key_value[:, 0], layer, decoder.num_heads, rotations)
        return key_value

    def _query_key_value(
        self, rows: torch.Tensor, layer: LayerWeights, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [M, query heads, D] and keys beside values [M, 2, KV heads, D] of block tokens."""
        decoder = self.config.decoder
        num_query, num_kv = decoder.num_heads, decoder.num_kv_heads
        parts = project(rms_norm(rows, layer.attention_norm), layer.qkv)
        heads = parts.view(len(rows), num_query + 2 * num_kv, decoder.head_dim)
        self._turn_(heads[:, : num_query + num_kv], layer, 0, rotations)
        return heads[:, :num_query], heads[:, num_query:].view(len(rows), 2, num_kv, decoder.head_dim)

    @staticmethod
    def _turn_(heads: torch.Tensor, layer: LayerWeights, first: int, rotations: torch.Tensor) -> None:
        """Norm each head of [M, heads, D] with the norms from ``first`` on and rotate it, in place."""
        norm = layer.head_norm
        if norm is not None:
            heads.copy_(rms_norm(heads, RmsNorm(norm.gain[first : first + heads.shape[1]], norm.floor)))
        rotate_(heads, rotations)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[slots, query heads * D]: every slot attends to all keys [KV heads, N, D], block and context alike.

    Without a mask the query heads of a group are just more rows of their KV head.
    """
    slots, num_heads, dim = query.shape
    num_kv = keys.shape[0]
    rows = query.view(slots, num_kv, num_heads // num_kv, dim).transpose(0, 1).reshape(num_kv, 1, -1, dim)
    output = F.scaled_dot_product_attention(rows, keys.unsqueeze(1), values.unsqueeze(1))
    return output.view(num_kv, slots, -1, dim).transpose(0, 1).reshape(slots, num_heads * dim)
