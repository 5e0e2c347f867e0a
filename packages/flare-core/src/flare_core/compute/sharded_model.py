"""One rank's model: the forward pass of all three families.

Knows layers, ranks and rotation; not requests, pages or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_core.compute.attention import AttentionPlan
from flare_core.compute.collectives import TensorCollectives
from flare_core.compute.layers import (
    LayerWeights,
    Projection,
    RmsNorm,
    project,
    project_onto,
    rms_norm,
    silu_product,
)
from flare_core.compute.model_config import ModelConfig
from flare_core.compute.rotary import Rotary, rotate_
from flare_core.compute.tensor_layout import RankShard

__all__ = ["ShardedModel", "Taps"]


@dataclass(slots=True)
class Taps:
    """Outputs of some layers, taken during one pass. They are equal on every rank.

    Attributes:
        layers: which, rising; -1 is the embedding. Never the last one: nobody computes it in a prefill.
    """

    layers: Sequence[int]
    _rows: list[torch.Tensor] = field(default_factory=list)

    def take(self, layer: int, rows: torch.Tensor) -> None:
        """``layer`` gave ``rows`` [M, hidden], which nobody changes any more."""
        if layer in self.layers:
            self._rows.append(rows)

    def side_by_side(self) -> torch.Tensor:
        """[M, layers * hidden], in the order of ``layers``."""
        return torch.cat(self._rows, dim=1)


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A decoder as one rank computes it. ``embedding`` and ``head`` hold the rank's vocabulary ids only.

    ``is_row_invariant``: up to :data:`flare_core.compute.half_weights.MAX_ROWS` rows computed together have the bits
    that each has alone. So it is where all products take the 16-bit copies, on one rank (a sum over ranks may add in
    another order at another place in the tensor).
    """

    config: ModelConfig
    shard: RankShard
    collectives: TensorCollectives
    rotary: Rotary
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: RmsNorm
    head: Projection
    is_row_invariant: bool

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, taps: Taps | None = None
    ) -> torch.Tensor:
        """Rows [M, hidden] after the last layer, before the final norm.

        ``token_ids`` [M] int64; ``positions`` [M] float32. Writes the tokens' keys and values through ``plan``, and
        leaves the outputs of tapped layers in ``taps``.
        """
        rows = self._first_rows(token_ids, taps)
        rotations = self.rotary.rotations(positions)
        for index in range(len(self.layers)):
            rows = self._layer(rows, index, rotations, plan, taps)
        return rows

    def prefill(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, taps: Taps | None = None
    ) -> None:
        """As :meth:`hidden` for tokens whose rows nobody wants: of the last layer only keys and values are computed."""
        rows = self._first_rows(token_ids, taps)
        rotations = self.rotary.rotations(positions)
        last = len(self.layers) - 1
        for index in range(last):
            rows = self._layer(rows, index, rotations, plan, taps)
        _, key_value = self._query_key_value(rows, self.layers[last], rotations)
        plan.write(last, key_value)

    def local_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [M, ids of this rank], float32, of rows as :meth:`hidden` gives them."""
        return self.head_logits(rms_norm(rows, self.final_norm))

    def head_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [M, ids of this rank], float32, of rows [M, hidden] that are normed already."""
        return project(normed, self.head).float()

    def gather_logits(self, local: torch.Tensor) -> torch.Tensor:
        """[M, vocabulary] on every rank, equal bit for bit: one collective, none at world size 1."""
        if self.shard.world_size == 1:
            return local
        widths = [len(span) for span in self.shard.vocab_spans]
        padded = F.pad(local, (0, max(widths) - local.shape[1]))
        parts = self.collectives.all_gather(padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def _first_rows(self, token_ids: torch.Tensor, taps: Taps | None) -> torch.Tensor:
        rows = self.embed(token_ids)
        if taps is not None:
            taps.take(-1, rows)
        return rows

    def _layer(
        self, rows: torch.Tensor, index: int, rotations: torch.Tensor, plan: AttentionPlan, taps: Taps | None
    ) -> torch.Tensor:
        rows = self._mlp(self._attention(rows, index, self.layers[index], rotations, plan), self.layers[index])
        if taps is not None:
            taps.take(index, rows)
        return rows

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows [M, hidden] of ids [M] int64, on every rank: one collective, none at world size 1."""
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
        query, key_value = self._query_key_value(rows, layer, rotations)
        return self._sum(rows, plan.attend(index, query, key_value), layer.output)

    def _query_key_value(
        self, rows: torch.Tensor, layer: LayerWeights, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries [M, query heads, D], and rotated keys beside values [M, 2, KV heads, D]."""
        dim = self.config.head_dim
        num_query, num_kv = len(self.shard.heads.query), len(self.shard.heads.kv)
        normed = rms_norm(rows, layer.attention_norm)
        parts = project(normed, layer.qkv).view(rows.shape[0], num_query + 2 * num_kv, dim)
        turned = parts[:, : num_query + num_kv]
        if layer.head_norm is not None:
            turned.copy_(rms_norm(turned, layer.head_norm))
        rotate_(turned, rotations)
        return parts[:, :num_query], parts[:, num_query:].view(rows.shape[0], 2, num_kv, dim)

    def _mlp(self, rows: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        normed = rms_norm(rows, layer.mlp_norm)
        return self._sum(rows, silu_product(project(normed, layer.gate_up)), layer.down)

    def _sum(self, residual: torch.Tensor, rows: torch.Tensor, projection: Projection) -> torch.Tensor:
        """The residual plus the projection's partial results of all ranks."""
        if self.shard.world_size == 1:
            return project_onto(residual, rows, projection)
        partial = project(rows, projection)
        self.collectives.all_reduce_(partial)
        return partial.add_(residual)
