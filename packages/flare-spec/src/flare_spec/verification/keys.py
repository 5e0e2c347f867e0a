"""A total order over (value, id) as one int64: greater values first, of equal values the lower id first.

The upper 32 bits hold the value's bits made monotonic (counted from 0), the lower 22 the id counted down: 54 bits.
"""

from __future__ import annotations

import math

import torch

__all__ = ["ID_BITS", "KEY_BITS", "lowest_key", "order_keys", "values_of"]

ID_BITS = 22
KEY_BITS = 32 + ID_BITS
_LAST_ID = (1 << ID_BITS) - 1
_SIGN = 1 << 31


def order_keys(values: torch.Tensor, start: int) -> torch.Tensor:
    """Keys, int64 like ``values`` [R, n], float32 without NaN, of the ids from ``start`` on; ids are below 2**22."""
    # Adding zero turns -0.0 into 0.0, which is equal to it.
    bits = (values + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + _SIGN
    ids = torch.arange(start, start + values.shape[1], device=values.device)
    return (ordered << ID_BITS) | (_LAST_ID - ids)


def values_of(keys: torch.Tensor) -> torch.Tensor:
    """The float32 values in ``keys``."""
    ordered = ((keys >> ID_BITS) - _SIGN).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def lowest_key(device: torch.device) -> int:
    """The key that stands for no id at all: minus infinity, behind every id."""
    return int(order_keys(torch.full((1, 1), -math.inf, device=device), _LAST_ID))
