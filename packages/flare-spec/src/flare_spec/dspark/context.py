"""The context that a block drafter attends to, for one sequence: keys and values of every layer by position.

Owns the buffer, its growth and its truncation. Does not know where keys and values come from, nor other sequences.
"""

from __future__ import annotations

import torch

from flare_core.compute.model_config import ModelConfig
from flare_core.errors import FlareError

__all__ = ["ContextStore"]

_MIN_CAPACITY = 64
"""Positions that a store has room for at first."""


class ContextStore:
    """Keys and values of the positions [first, stop) of one sequence. Not thread-safe.

    A position's keys and values depend on the target's outputs at that position alone, so positions are only ever
    added at the end and cut from it; nothing in the store goes stale. ``first`` is above 0 where what lies before is
    not known (a prefix restored without its draft state): those positions are simply not attended to.

    A block's own keys and values are written behind ``stop`` for the time of one forward pass; they are never part of
    the store and the next append or block overwrites them.
    """

    def __init__(self, memory: torch.Tensor, first: int) -> None:
        self._memory = memory  # [layers, 2 (keys, values), KV heads, capacity, D]
        self._first = first
        self._length = 0

    @classmethod
    def create(
        cls,
        decoder: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        first: int = 0,
        capacity: int = _MIN_CAPACITY,
    ) -> ContextStore:
        """An empty store for a drafter with the layers of ``decoder``; ``capacity`` positions before it has to grow."""
        shape = (decoder.num_layers, 2, decoder.num_kv_heads, capacity, decoder.head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device), first)

    @property
    def first(self) -> int:
        """The first position that is known."""
        return self._first

    @property
    def stop(self) -> int:
        """One past the last position that is known: where the next anchor stands."""
        return self._first + self._length

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self._memory.nbytes

    def append(self, key_value: torch.Tensor) -> None:
        """Add positions: [layers, positions, 2, KV heads, D], keys normed and rotated at [stop, stop + positions)."""
        count = key_value.shape[1]
        self._reserve(count)
        self._memory[:, :, :, self._length : self._length + count].copy_(key_value.permute(0, 2, 3, 1, 4))
        self._length += count

    def truncate(self, stop: int) -> None:
        """Forget the positions from ``stop`` on.

        Raises:
            FlareError: ``stop`` lies outside of what is known.
        """
        if not self._first <= stop <= self.stop:
            raise FlareError(f"a context of positions {self._first} to {self.stop} cannot be cut at {stop}")
        self._length = stop - self._first

    def key_value(self, start: int, stop: int) -> torch.Tensor:
        """A view of the positions [start, stop), all within the store: [layers, 2, KV heads, positions, D]."""
        return self._memory[:, :, :, start - self._first : stop - self._first]

    def with_block(self, layer: int, key_value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [KV heads, positions + slots, D] of a layer: the context, then the block's.

        ``key_value`` [slots, 2, KV heads, D]. Views into the buffer, valid until the next call that changes it.
        """
        slots = key_value.shape[0]
        self._reserve(slots)
        whole = self._memory[layer, :, :, : self._length + slots]
        whole[:, :, self._length :].copy_(key_value.permute(1, 2, 0, 3))
        return whole[0], whole[1]

    def _reserve(self, count: int) -> None:
        capacity = self._memory.shape[3]
        if self._length + count <= capacity:
            return
        grown = max(2 * capacity, self._length + count)
        shape = (*self._memory.shape[:3], grown, self._memory.shape[4])
        memory = torch.empty(shape, dtype=self._memory.dtype, device=self._memory.device)
        memory[:, :, :, : self._length].copy_(self._memory[:, :, :, : self._length])
        self._memory = memory
