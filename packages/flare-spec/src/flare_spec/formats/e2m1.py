"""Owns E2M1, the 4-bit element of NVFP4 (OCP MX v1.0, section 5.3.3), and its packing by two. Knows no scales.

A code is ``s ee m``: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 for codes 0 to 7, negative with 8 added. There is neither
infinity nor NaN. In a packed byte the element with the even index lies in the low nibble.
"""

from __future__ import annotations

from typing import Final

import torch

from flare_spec.formats.minifloat import Minifloat, round_to_codes

__all__ = ["E2M1_LARGEST", "decode_e2m1", "decode_packed_e2m1", "encode_e2m1", "pack_nibbles", "unpack_nibbles"]

E2M1_LARGEST: Final = 6.0
_LAYOUT: Final = Minifloat(mantissa_bits=1, min_exponent=0, largest=E2M1_LARGEST)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0 to 15, the shape of ``values``) of fp32 ``values``: nearest, ties to even, saturating at 6.

    Zero keeps its sign. NaN, for which there is no code, saturates as infinity does.
    """
    sign = (values.view(torch.int32) >> 28) & 0x8
    return (round_to_codes(values.abs(), _LAYOUT) | sign).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Values (fp32, exact) of ``codes`` (uint8, the high nibble is not looked at)."""
    wide = codes.to(torch.int16)
    # In fp16 the three bits below the sign's exponent mean the same number, 2**14 times smaller.
    half = (((wide & 0x8) << 12) | ((wide & 0x7) << 9)).view(torch.float16)
    return half.to(torch.float32) * 2.0**14


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 ``codes`` below 16, [..., K] with an even K, as bytes [..., K/2]: element 2i low, 2i+1 high."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The codes [..., K] (uint8, below 16) in ``packed`` (uint8 [..., K/2])."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_packed_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Values (fp32 [..., K]) of ``packed`` (uint8 [..., K/2]): one look-up gives both values of a byte."""
    # Six times as fast on a CPU as arithmetic on the codes. Made on the device, the table is not copied to it.
    every_byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
    pairs = decode_e2m1(unpack_nibbles(every_byte)).view(torch.int64)
    values = pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.float32)
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])
