"""Arithmetic of the oracle model: bytes of pages and rows from tokens, and scores from bytes. Pure functions.

Everything derives from SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), whose
finaliser is a bijection of 64-bit words, and from BLAKE2b where bytes are condensed. Deterministic on every platform.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flare_core.keys import TokenIds
from flare_core.testing.oracle_config import BYTE_OFFSET, EOS_TOKEN, OracleConfig

__all__ = [
    "Bytes",
    "Floats",
    "Words",
    "combine_ranks",
    "entry_bytes",
    "mix",
    "mix_int",
    "page_term",
    "prefix_digests",
    "row_delta",
    "score_bias",
    "scores",
    "uniform",
]

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def mix(words: Words) -> Words:
    """SplitMix64's finaliser of each word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))


def mix_int(word: int) -> int:
    """The same of one Python integer."""
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def prefix_digests(token_ids: TokenIds, *, start: int, before: int, seed: int) -> Words:
    """Digest of the prefix that ends with each of ``token_ids``, which stand at ``start``; shape [n].

    ``before`` is the digest of the tokens ahead of ``start`` (0 at the beginning). A digest is a sum over
    (token, position), so that a chunk of any length gives the same values.
    """
    positions = np.arange(start, start + len(token_ids), dtype=np.uint64)
    terms = mix(token_ids.astype(np.uint64) * np.uint64(_FIRST) + positions * np.uint64(_GOLDEN) + np.uint64(seed))
    return np.cumsum(terms, dtype=np.uint64) + np.uint64(before)


def entry_bytes(digests: Words, *, rank: int, plane: int, num_bytes: int) -> Bytes:
    """Bytes that ``rank`` keeps in plane number ``plane`` for the tokens with these digests; shape [n, num_bytes]."""
    lane = np.uint64(mix_int(((rank << 20) + plane + 1) * _GOLDEN & _MASK))
    num_words = -(-num_bytes // 8)
    offsets = np.arange(num_words, dtype=np.uint64) * np.uint64(_GOLDEN)
    words = mix(mix(digests ^ lane)[:, None] + offsets[None, :])
    return words.astype("<u8", copy=False).view(np.uint8)[:, :num_bytes]


def row_delta(digests: Words, *, rank: int, num_bytes: int) -> Bytes:
    """What the tokens with these digests add to a row, byte by byte modulo 256; shape [num_bytes]."""
    total = np.zeros(num_bytes, dtype=np.uint8)
    for at in range(0, len(digests), 256):
        part = entry_bytes(digests[at : at + 256], rank=rank, plane=(1 << 19) - 1, num_bytes=num_bytes)
        total += np.add.reduce(part, axis=0, dtype=np.uint8)
    return total


def page_term(index: int, digest: int) -> int:
    """What page ``index`` of a sequence adds to the digest of all its pages (a sum modulo 2**64)."""
    return mix_int((digest ^ mix_int((index + 1) * _GOLDEN & _MASK)) & _MASK)


def combine_ranks(parts: Sequence[bytes], position: int) -> int:
    """The word that the scores at ``position`` derive from: every rank's digest, in rank order."""
    digest = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def score_bias(config: OracleConfig) -> Floats:
    """Fixed part of the scores, shape [vocab_size]: printable ASCII is likely, what has no byte is not."""
    bias = np.full(config.vocab_size, -8.0)
    bias[BYTE_OFFSET + 32 : BYTE_OFFSET + 127] = 0.0
    bias[EOS_TOKEN] = config.eos_bias
    return bias


def scores(word: int, bias: Floats) -> Floats:
    """Raw scores (logits) of every id, float64 [vocab_size]."""
    return uniform(word, len(bias)) * 8.0 + bias


def uniform(word: int, count: int) -> Floats:
    """``count`` values in (0, 1) that derive from ``word``."""
    words = mix(np.uint64(word) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
