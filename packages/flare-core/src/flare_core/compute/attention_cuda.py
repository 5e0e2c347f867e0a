"""Paged attention in plain torch operations, for CUDA: gather, mask, scaled dot product.

Right before fast: every step gathers. What a mask hides is zeroed first, so that no byte of another sequence can
reach a result, not even as NaN. cuDNN's kernels are never used: on an H200 the same input gave other bits from call to
call, and a restored prefix must give the bits of the cold one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows
from torch.nn.attention import SDPBackend, sdpa_kernel

from flare_core.compute.attention import AttentionPlan, BatchRow
from flare_core.compute.kv_memory import KvMemory

__all__ = ["GatherAttention"]

# For one row a plain product reads each key once on all multiprocessors; for a chunk its scores would not fit.
_ROW_BACKENDS = [SDPBackend.MATH]
_CHUNK_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class GatherAttention:
    """The device backend over one pool; works on any device."""

    def __init__(self, kv: KvMemory) -> None:
        self._kv = kv
        self._device = kv.views.device

    def chunk(self, pages: Sequence[int], start: int, num_tokens: int) -> AttentionPlan:
        """As :meth:`flare_core.compute.attention.PagedAttention.chunk`."""
        size = self._kv.geometry.page_tokens
        positions = torch.arange(start, start + num_tokens)
        held = torch.tensor(pages[: -(-(start + num_tokens) // size)], dtype=torch.int64)
        columns = torch.arange(len(held) * size)
        mask = (columns.unsqueeze(0) <= positions.unsqueeze(1)).unsqueeze(0)
        return self._plan(held.unsqueeze(0), held[positions // size], positions % size, mask)

    def batch(self, rows: Sequence[BatchRow]) -> AttentionPlan:
        """As :meth:`flare_core.compute.attention.PagedAttention.batch`."""
        size = self._kv.geometry.page_tokens
        width = max(row.position // size + 1 for row in rows)
        tables = torch.zeros((len(rows), width), dtype=torch.int64)
        for index, row in enumerate(rows):
            count = row.position // size + 1
            tables[index, :count] = torch.tensor(row.pages[:count])
        positions = torch.tensor([row.position for row in rows])
        columns = torch.arange(width * size)
        mask = (columns.unsqueeze(0) <= positions.unsqueeze(1)).unsqueeze(1)
        targets = tables.gather(1, (positions // size).unsqueeze(1)).squeeze(1)
        return self._plan(tables, targets, positions % size, mask)

    def _plan(
        self, tables: torch.Tensor, targets: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
    ) -> AttentionPlan:
        device = self._device
        return _Plan(
            self._kv,
            tables=tables.to(device, non_blocking=True),
            targets=targets.to(device, non_blocking=True),
            slots=slots.to(device, non_blocking=True),
            mask=mask.to(device, non_blocking=True),
        )


class _Plan:
    """``tables`` [B, pages]; ``targets``, ``slots`` [M]: where each token is written; ``mask`` [B, M / B, columns]."""

    def __init__(
        self, kv: KvMemory, *, tables: torch.Tensor, targets: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
    ) -> None:
        self._kv = kv
        self._tables = tables
        self._targets = targets
        self._slots = slots
        self._mask = mask.unsqueeze(1)
        self._hidden = ~mask.any(1)[:, :, None, None]

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        self._kv.views[:, layer][self._targets, :, self._slots] = key_value

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        self.write(layer, key_value)
        pool = self._kv.views[:, layer]
        num_sequences = self._tables.shape[0]
        gathered = pool[self._tables]  # [B, pages, 2, token, head, dim]
        keys = gathered[:, :, 0].flatten(1, 2).masked_fill(self._hidden, 0).transpose(1, 2)
        values = gathered[:, :, 1].flatten(1, 2).masked_fill(self._hidden, 0).transpose(1, 2)
        heads = query.reshape(num_sequences, -1, *query.shape[1:]).transpose(1, 2)
        group = heads.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        with sdpa_kernel(_CHUNK_BACKENDS if heads.shape[2] > 1 else _ROW_BACKENDS):
            output = F.scaled_dot_product_attention(heads, keys, values, attn_mask=self._mask)
        return output.transpose(1, 2).reshape(query.shape[0], -1)
