"""Owns E8M0, the shared scale of MX blocks (OCP MX v1.0, section 5.4.1). Knows no elements or blocks.

A code c means 2**(c - 127), 255 means NaN; there is no sign, zero or infinity. ``torch.float8_e8m0fnu``.
"""

from __future__ import annotations

import enum
from typing import Final

import torch

__all__ = ["E8M0Rounding", "decode_e8m0", "encode_e8m0"]

_NAN: Final = 255
_LARGEST: Final = 254


class E8M0Rounding(enum.Enum):
    """Which power of two stands for a number between two of them: the two that hardware converts with."""

    DOWN = enum.auto()
    UP = enum.auto()


def encode_e8m0(values: torch.Tensor, rounding: E8M0Rounding) -> torch.Tensor:
    """Codes (uint8, the shape of ``values``) of the magnitudes of fp32 ``values``, saturating: 2**-127 to 2**127.

    Zero gives the smallest power, infinity the largest, NaN gives NaN.
    """
    bits = values.view(torch.int32) & 0x7FFFFFFF
    exponent = bits >> 23
    if rounding is E8M0Rounding.UP:
        # Subnormals of fp32 lie below 2**-126, and half of that still has a code: it is the first to need no step up.
        exact = torch.where(exponent == 0, 1 << 22, 0)
        exponent = exponent + ((bits & 0x7FFFFF) > exact).to(torch.int32)
    return torch.where(values.isnan(), _NAN, exponent.clamp(max=_LARGEST)).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Values (fp32, exact) of ``codes`` (uint8 or float8_e8m0fnu); the smallest is a subnormal of fp32."""
    exponent = codes.view(torch.uint8).to(torch.int32)
    # One bit of mantissa makes 2**-127 of what would be zero, and NaN of what would be infinity.
    mantissa = ((exponent == 0) | (exponent == _NAN)).to(torch.int32) << 22
    return ((exponent << 23) | mantissa).view(torch.float32)
