"""Philox4x32-10 (Salmon et al., SC 2011) in vectorised int64 arithmetic, and Gumbel noise from it.

Counter = (vocabulary id >> 2, position low, position high, stream), lane = vocabulary id & 3, key = request seed:
noise depends on the request, the position and the id only, never on batch, rank or block size.
"""

from __future__ import annotations

import torch

__all__ = [
    "STREAM_ACCEPT",
    "STREAM_DRAFT",
    "STREAM_RESIDUAL",
    "STREAM_SAMPLE",
    "gumbel",
    "gumbel_span",
    "philox4x32",
    "uniform",
]

STREAM_ACCEPT = 0
"""Whether a drafted token is accepted."""
STREAM_SAMPLE = 1
"""Token sampling; verification of drafts has streams of its own, but where it emits what sampling would."""
STREAM_DRAFT = 2
"""Drafting, where the verification is not coupled to it."""
STREAM_RESIDUAL = 3
"""The token in place of a rejected draft."""

_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10
_LEAST_GUMBEL = -3.0
"""Below G of the greatest float32 under 1, which is -2.81."""


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
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, *, stream: int | torch.Tensor = STREAM_SAMPLE
) -> torch.Tensor:
    """Gumbel noise, float32, one value for each (seed, position, id, stream); int64 tensors of shapes that broadcast.

    ``seeds`` holds 64-bit keys as two's complement. With u = (x + 1/2) / 2**32, G = -log(-log1p(-u)): the
    resolution lies at u near 0, where winners come from. A u that rounds to 1 gives -3, just below the least other
    value, so that an id without a rival wins still.
    """
    words = _words(seeds, positions, token_ids >> 2, stream)
    lane = (token_ids & 3).expand_as(words[0])
    bits = torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3]))
    return _gumbel_of(bits)


def gumbel_span(
    seeds: torch.Tensor, positions: torch.Tensor, *, start: int, stop: int, stream: int | torch.Tensor = STREAM_SAMPLE
) -> torch.Tensor:
    """What :func:`gumbel` gives for ids ``start`` to ``stop``, float32 [R, stop - start], for a quarter of the work.

    ``seeds``, ``positions`` and, if it is a tensor, ``stream``: int64 [R].
    """
    blocks = torch.arange(start >> 2, (stop + 3) >> 2, device=seeds.device)
    rows = stream.unsqueeze(1) if isinstance(stream, torch.Tensor) else stream
    words = torch.stack(_words(seeds.unsqueeze(1), positions.unsqueeze(1), blocks, rows), dim=-1)
    first = start & 3
    return _gumbel_of(words.flatten(1)[:, first : first + stop - start])


def uniform(seeds: torch.Tensor, positions: torch.Tensor, *, stream: int) -> torch.Tensor:
    """One number strictly between 0 and 1 for each (seed, position, stream), float64; int64 tensors of one shape."""
    return (_words(seeds, positions, torch.zeros_like(positions), stream)[0].to(torch.float64) + 0.5) * 2.0**-32


def _words(
    seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor, stream: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    streams = stream if isinstance(stream, torch.Tensor) else torch.full_like(positions, stream)
    counter = (blocks, positions & _MASK, (positions >> 32) & _MASK, streams)
    return philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))


def _gumbel_of(bits: torch.Tensor) -> torch.Tensor:
    uniform_values = ((bits.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32)
    return (-torch.log(-torch.log1p(-uniform_values))).clamp_(min=_LEAST_GUMBEL)
