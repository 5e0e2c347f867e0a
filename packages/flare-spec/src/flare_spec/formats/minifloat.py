"""Owns rounding fp32 magnitudes to the codes of a small binary float. Knows no signs, scales or particular format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Minifloat", "round_to_codes"]

_FLOAT32_BIAS = 127
_FLOAT32_MANTISSA_BITS = 23


@dataclass(frozen=True, slots=True)
class Minifloat:
    """A float with subnormals whose codes ascend with the magnitude, as in IEEE 754 and OCP MX v1.0."""

    mantissa_bits: int
    min_exponent: int
    """The smallest normal number is two to this power."""
    largest: float
    """The largest finite magnitude; greater ones saturate to it."""


def round_to_codes(magnitudes: torch.Tensor, layout: Minifloat) -> torch.Tensor:
    """Codes (int32, sign excluded) nearest to ``magnitudes`` (fp32, not negative), ties to the even code.

    Saturates: what is greater than ``layout.largest``, infinity and NaN give the code of ``layout.largest``.
    """
    # fmin, unlike clamp, prefers the number to a NaN.
    bounded = torch.fmin(magnitudes, magnitudes.new_full((), layout.largest))
    shift = _FLOAT32_MANTISSA_BITS - layout.mantissa_bits
    bits = bounded.view(torch.int32)
    # Half of the last kept place less one, plus that place's bit: a carry exactly when the rest says "up".
    rounded = (bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift
    normal = rounded - ((_FLOAT32_BIAS + layout.min_exponent - 1) << layout.mantissa_bits)
    # Added to this power of two, a number keeps the subnormals' step as its last place: the adder rounds to even.
    exponent = layout.min_exponent + shift
    subnormal = (bounded + 2.0**exponent).view(torch.int32) - ((_FLOAT32_BIAS + exponent) << _FLOAT32_MANTISSA_BITS)
    return torch.where(bounded < 2.0**layout.min_exponent, subnormal, normal)
