"""Owns E4M3, the 8-bit element of FP8 and MXFP8 and the block scale of NVFP4 (OCP OFP8 v1.0). Knows no scales.

The variant without infinities, ``torch.float8_e4m3fn``: largest magnitude 448, subnormals in steps of 2**-9, NaN where
all bits but the sign are set.
"""

from __future__ import annotations

from typing import Final

import torch

from flare_spec.formats.minifloat import Minifloat, round_to_codes

__all__ = ["E4M3_LARGEST", "E4M3_SMALLEST", "decode_e4m3", "encode_e4m3"]

E4M3_LARGEST: Final = 448.0
E4M3_SMALLEST: Final = 2.0**-9
_LAYOUT: Final = Minifloat(mantissa_bits=3, min_exponent=-6, largest=E4M3_LARGEST)
_NAN: Final = 0x7F


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, the shape of ``values``) of fp32 ``values``: nearest, ties to even, saturating at 448.

    Infinity saturates too; NaN stays NaN; zero and NaN keep their sign.
    """
    sign = (values.view(torch.int32) >> 24) & 0x80
    magnitudes = torch.where(values.isnan(), _NAN, round_to_codes(values.abs(), _LAYOUT))
    return (magnitudes | sign).to(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Values (fp32, exact) of ``codes`` (uint8 or float8_e4m3fn)."""
    # A look-up is six times as fast on a CPU as torch's conversion. The table is made on the device by bits: in fp16
    # exponent and mantissa mean the same number, 2**8 times smaller, and only NaN has to be put right.
    every_code = torch.arange(256, dtype=torch.int16, device=codes.device)
    half = (((every_code & 0x80) << 8) | ((every_code & 0x7F) << 7)).view(torch.float16)
    table = (half.to(torch.float32) * 2.0**8).masked_fill((every_code & 0x7F) == _NAN, torch.nan)
    return table.index_select(0, codes.view(torch.uint8).reshape(-1).to(torch.int32)).view(codes.shape)
