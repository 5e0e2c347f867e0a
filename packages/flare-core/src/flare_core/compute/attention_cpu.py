"""Paged attention on the CPU: pages are gathered into scratch that lives as long as the backend, then attended.

Gathering copies bytes in the order of tokens, and attention sees only the copy; so a sequence's bits depend on its
tokens and never on which pages hold them. A decode row is computed alone, whatever is beside it in the batch.
Query heads of one KV head are folded into query rows, so that grouped heads read keys and values once. Partial
results are combined by their log-sum-exp (flash-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flare_core.compute.attention import AttentionPlan, BatchRow
from flare_core.compute.kv_memory import KvMemory

__all__ = ["CpuAttention"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # gives the log-sum-exp too


class CpuAttention:
    """The CPU backend over one pool. Plans share its scratch: one plan is in use at a time."""

    def __init__(self, kv: KvMemory) -> None:
        self._kv = kv
        self._page_tokens = kv.geometry.page_tokens
        self._scratch = kv.views.new_zeros((2, 0, *kv.views.shape[-3:]))
        # Each layer's keys and values, a page in one row: what gathering reads.
        flat = kv.views.flatten(3)
        self._gather_from = [(flat[:, layer, 0], flat[:, layer, 1]) for layer in range(flat.shape[1])]
        self._layers = [kv.views[:, layer] for layer in range(flat.shape[1])]

    def chunk(self, pages: Sequence[int], start: int, num_tokens: int) -> AttentionPlan:
        """As :meth:`flare_core.compute.attention.PagedAttention.chunk`."""
        return _Chunk(self, pages, start, num_tokens)

    def batch(self, rows: Sequence[BatchRow]) -> AttentionPlan:
        """As :meth:`flare_core.compute.attention.PagedAttention.batch`."""
        return _Batch(self, rows)

    def reserve(self, num_pages: int) -> torch.Tensor:
        """Scratch [2, num_pages, token, head, dim]; grows by doubling, never shrinks."""
        if self._scratch.shape[1] < num_pages:
            room = max(num_pages, 2 * self._scratch.shape[1])
            self._scratch = self._scratch.new_zeros((2, room, *self._scratch.shape[2:]))
        return self._scratch[:, :num_pages]

    def gather(self, layer: int, page_ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values of ``page_ids`` [P] into scratch, each [P, token * head * dim]."""
        pool_keys, pool_values = self._gather_from[layer]
        torch.index_select(pool_keys, 0, page_ids, out=keys)
        torch.index_select(pool_values, 0, page_ids, out=values)

    def layer(self, layer: int) -> torch.Tensor:
        """[page, k|v, token, head, dim] of one layer, in the pool."""
        return self._layers[layer]

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._page_tokens

    @property
    def views(self) -> torch.Tensor:
        """The pool as :attr:`KvMemory.views`."""
        return self._kv.views


class _Chunk:
    """Prefill of consecutive tokens of one sequence."""

    def __init__(self, backend: CpuAttention, pages: Sequence[int], start: int, num_tokens: int) -> None:
        self._backend = backend
        self._num_tokens = num_tokens
        size = backend.page_tokens
        self._writes: list[tuple[int, int, int, int]] = []  # page, first slot in it, first token, tokens
        at = start
        while at < start + num_tokens:
            count = min(size - at % size, start + num_tokens - at)
            self._writes.append((pages[at // size], at % size, at - start, count))
            at += count
        num_past = -(-start // size)
        self._past_ids = torch.tensor(pages[:num_past], dtype=torch.int64)
        self._start = start
        scratch = backend.reserve(num_past)
        self._keys, self._values = scratch.flatten(2).unbind(0)
        # Keys and values before the chunk, each [KV heads, 1, start, D], as attention reads them.
        self._past = scratch.flatten(1, 2)[:, :start].permute(0, 2, 1, 3).unsqueeze(2).unbind(0)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        pool = self._backend.layer(layer)
        for page, slot, token, count in self._writes:
            pool[page, :, slot : slot + count].copy_(key_value[token : token + count].transpose(0, 1))

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        num_tokens, num_heads, dim = query.shape
        num_kv_heads = key_value.shape[2]
        group = num_heads // num_kv_heads
        self.write(layer, key_value)
        # KV heads stand as the batch and a group's query heads as its heads: keys and values are read, not copied.
        heads = query.view(num_tokens, num_kv_heads, group, dim).permute(1, 2, 0, 3).contiguous()
        keys, values = key_value.permute(1, 2, 0, 3).unsqueeze(2).expand(-1, -1, group, -1, -1).unbind(0)
        own, own_lse = _flash(heads, keys, values, 0.0, True)
        if not self._start:
            return _tokens_first(own)
        self._backend.gather(layer, self._past_ids, self._keys, self._values)
        # Without a mask a group's heads are just more rows: the kernel works best with many.
        earlier, earlier_lse = _flash(heads.view(num_kv_heads, 1, group * num_tokens, dim), *self._past)
        weight = torch.sigmoid(earlier_lse.reshape(own_lse.shape) - own_lse).unsqueeze(-1)
        return _tokens_first(torch.lerp(own, earlier.reshape(own.shape), weight.to(own.dtype)))


def _tokens_first(heads: torch.Tensor) -> torch.Tensor:
    """[KV heads, group, M, D] to [M, query heads * D]."""
    return heads.permute(2, 0, 1, 3).reshape(heads.shape[2], -1)


def _shared_pages(rows: Sequence[BatchRow], page_tokens: int) -> tuple[list[int], list[int]]:
    """Pages to gather, and where among them each row begins; rows of one sequence, which stand together, share them."""
    page_ids: list[int] = []
    firsts: list[int] = []
    for index, row in enumerate(rows):
        num_pages = row.position // page_tokens + 1
        if index and row.pages is rows[index - 1].pages:
            first = firsts[-1]
            page_ids.extend(row.pages[len(page_ids) - first : num_pages])
        else:
            first = len(page_ids)
            page_ids.extend(row.pages[:num_pages])
        firsts.append(first)
    return page_ids, firsts


class _Batch:
    """Decode: rows of one token each, several of one sequence where drafts are verified.

    Views are made here, once a step, and not once a layer.
    """

    def __init__(self, backend: CpuAttention, rows: Sequence[BatchRow]) -> None:
        self._backend = backend
        size = backend.page_tokens
        page_ids, firsts = _shared_pages(rows, size)
        scratch = backend.reserve(len(page_ids))
        self._keys, self._values = scratch.flatten(2).unbind(0)
        tokens = scratch.flatten(1, 2)
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for row, first in zip(rows, firsts, strict=True):
            own = tokens[:, first * size : first * size + row.position + 1].transpose(1, 2).unsqueeze(1)
            self._rows.append((own[0], own[1]))
        self._page_ids = torch.tensor(page_ids, dtype=torch.int64)
        pages = [row.pages[row.position // size] for row in rows]
        slots = [row.position % size for row in rows]
        self._where = (torch.tensor(pages).unsqueeze(1), torch.tensor([[0, 1]]), torch.tensor(slots).unsqueeze(1))
        # One row is written through views of its place in every layer, [layer][1, k|v, head, dim].
        self._targets = backend.views[pages[0], :, :, slots[0]].unsqueeze(1).unbind(0) if len(rows) == 1 else ()

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        if self._targets:
            self._targets[layer].copy_(key_value)
        else:
            self._backend.layer(layer).index_put_(self._where, key_value)

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        num_rows, num_heads, dim = query.shape
        num_kv_heads = key_value.shape[2]
        self.write(layer, key_value)
        self._backend.gather(layer, self._page_ids, self._keys, self._values)
        folded = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
        if num_rows == 1:
            keys, values = self._rows[0]
            output: torch.Tensor = _flash(folded, keys, values)[0]
            return output.view(1, num_heads * dim)
        outputs = [
            _flash(row, keys, values)[0]
            for row, (keys, values) in zip(folded.unsqueeze(1).unbind(0), self._rows, strict=True)
        ]
        return torch.cat(outputs).view(num_rows, num_heads * dim)
