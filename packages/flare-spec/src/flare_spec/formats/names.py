"""Owns the names of head formats, as settings spell them. Knows no tensors and loads no torch."""

from __future__ import annotations

import enum

from flare_core.errors import UsageError

__all__ = ["HeadFormat", "parse_head_format"]


class HeadFormat(enum.StrEnum):
    """How the weight of a draft or Markov head lies in memory; the value is its spelling in settings."""

    BF16 = "bf16"
    """As it is: 16 bits an element."""
    FP8 = "fp8"
    """E4M3 with an fp32 scale a row: 8 bits an element."""
    NVFP4 = "nvfp4"
    """E2M1, an E4M3 scale a block of 16, an fp32 scale a tensor: 4.5 bits an element."""
    MXFP8 = "mxfp8"
    """E4M3, an E8M0 scale a block of 32: 8.25 bits an element."""


def parse_head_format(text: str) -> HeadFormat:
    """The format that ``text`` names; a ``UsageError`` lists the formats if none is."""
    try:
        return HeadFormat(text)
    except ValueError:
        raise UsageError(f"head format {text!r} is not known; use one of {', '.join(HeadFormat)}") from None
