"""Philox4x32-10 (Salmon et al., SC 2011) in vectorised int64 arithmetic, and Gumbel noise from it.

Counter = (vocabulary id >> 2, position low, position high, stream), lane = vocabulary id & 3, key = request seed:
noise depends on the request, the position and the id only, never on batch, rank or block size.
"""

from __future__ import annotations

import torch

__all__ = ["STREAM_DRAFT", "STREAM_SAMPLE", "gumbel", "philox4x32"]

STREAM_SAMPLE = 1
"""The stream of token sampling; verification of drafts has streams of its own."""
STREAM_DRAFT = 2
"""Drafting, where the verification is not coupled to it."""

_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words for each counter; all tensors int64 holding 32-bit values, of shapes that broadcast.

    Products of two 32-bit words wrap in int64, which leaves their bits right: shifts are masked.
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        product0 = word0 * _MULTIPLIER_0
        product1 = word2 * _MULTIPLIER_1
        word0 = ((product1 >> 32) & _MASK) ^ word1 ^ key0
        word1 = product1 & _MASK
        word2 = ((product0 >> 32) & _MASK) ^ word3 ^ key1
        word3 = product0 & _MASK
        key0 = (key0 + _WEYL_0) & _MASK
        key1 = (key1 + _WEYL_1) & _MASK
    return word0, word1, word2, word3


def gumbel(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, *, stream: int = STREAM_SAMPLE
) -> torch.Tensor:
    """Gumbel noise, float32, one value for each (seed, position, id); int64 tensors of shapes that broadcast.

    ``seeds`` holds 64-bit keys as two's complement. With u = (x + 1/2) / 2**32, G = -log(-log1p(-u)): the
    resolution lies at u near 0, where winners come from. A u that rounds to 1 gives -inf, which is harmless.
    """
    counter = (token_ids >> 2, positions & _MASK, (positions >> 32) & _MASK, torch.full_like(positions, stream))
    words = philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    lane = (token_ids & 3).expand_as(words[0])
    bits = torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3]))
    uniform = ((bits.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32)
    return -torch.log(-torch.log1p(-uniform))
