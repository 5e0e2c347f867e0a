"""The simulated model: what pages and rows hold for given tokens, and the token that follows from what was read.

A token's entry on a rank is a word over the whole prefix, the tenant and the rank; the next token is a hash of every
byte of every page and row that a step reads, on all ranks. So a stale, foreign or missing byte changes the text, and
what the text should be is a function of the tokens alone. SplitMix64 and xxh3; no memory, no plan, no rank's state.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from flare_core.geometry import Axis, Geometry, Plane
from flare_core.testing.oracle_math import mix_int, prefix_digests

__all__ = ["ENTRY_BYTES", "Model", "Words", "choose_token"]

ENTRY_BYTES = 8
_MASK = (1 << 64) - 1
_WORD = struct.Struct("<Q")
_MODEL_SEED = 20_261_130

Words = NDArray[np.uint64]


def choose_token(parts: Sequence[bytes], position: int, vocab_size: int) -> int:
    """The token at ``position`` from every rank's condensed bytes."""
    digest: int = xxhash.xxh3_64_intdigest(b"".join(parts), position)
    return digest % vocab_size


@dataclass(slots=True)
class Model:
    """One model on ``world_size`` ranks.

    Attributes:
        page_tokens: tokens of a page.
        vocab_size: of the tokens that it chooses and is prompted with.
        has_rows: it keeps a row a sequence.
        is_uneven: the last rank's pages are twice as large as the others'.
    """

    world_size: int
    page_tokens: int
    vocab_size: int
    has_rows: bool
    is_uneven: bool
    _memo: dict[tuple[bytes, int], Words] = field(default_factory=dict)

    def geometries(self) -> tuple[Geometry, ...]:
        """Every rank's."""
        return tuple(
            Geometry(rank, self.world_size, self.page_tokens, self._planes(rank), ENTRY_BYTES if self.has_rows else 0)
            for rank in range(self.world_size)
        )

    def _planes(self, rank: int) -> tuple[Plane, ...]:
        kv = Plane("kv", "uint8", (Axis("token", self.page_tokens), Axis("dim", ENTRY_BYTES)))
        if not self.is_uneven or rank != self.world_size - 1:
            return (kv,)
        # Never written: it only makes the page longer.
        return (kv, Plane("pad", "uint8", (Axis("token", self.page_tokens), Axis("dim", 4096 // self.page_tokens))))

    def digests(self, token_ids: bytes, salt: int) -> Words:
        """The word of each prefix of ``token_ids`` (u32 little endian) for a tenant's ``salt``."""
        key = (token_ids, salt)
        found = self._memo.get(key)
        if found is None:
            tokens = np.frombuffer(token_ids, dtype="<u4")
            found = self._memo[key] = prefix_digests(tokens, start=0, before=salt, seed=_MODEL_SEED)
        return found

    def digests_from(self, token_ids: bytes, start: int, before: int) -> Words:
        """The words of tokens that stand at ``start``, behind a prefix with the word ``before``."""
        return prefix_digests(np.frombuffer(token_ids, dtype="<u4"), start=start, before=before, seed=_MODEL_SEED)

    def next_digest(self, before: int, token: int, position: int) -> int:
        """The word of one token more."""
        term = (token * 0xBF58476D1CE4E5B9 + position * 0x9E3779B97F4A7C15 + _MODEL_SEED) & _MASK
        return (before + mix_int(term)) & _MASK

    def lane(self, rank: int) -> int:
        """What makes a rank's bytes its own."""
        return mix_int(rank + 1) | 1

    def entries(self, digests: Words, rank: int) -> bytes:
        """Bytes that ``rank`` keeps for the tokens with these words, ENTRY_BYTES each."""
        return (digests ^ np.uint64(self.lane(rank))).astype("<u8", copy=False).tobytes()

    def entry(self, digest: int, rank: int) -> bytes:
        """The same for one token."""
        return _WORD.pack(digest ^ self.lane(rank))

    def row_after(self, row: bytes, digests: Words, rank: int) -> bytes:
        """The row after the tokens with these words, from what it was before."""
        total = int(digests.sum(dtype=np.uint64))
        return _WORD.pack((_WORD.unpack(row)[0] + total * self.lane(rank)) & _MASK)

    def row_of(self, total: int, rank: int) -> bytes:
        """The row of tokens whose words sum up to ``total``."""
        return _WORD.pack((total * self.lane(rank)) & _MASK)

    def row_after_one(self, row: bytes, digest: int, rank: int) -> bytes:
        """The same for one token."""
        return _WORD.pack((_WORD.unpack(row)[0] + digest * self.lane(rank)) & _MASK)

    def condense(self, entries: bytes, row: bytes) -> bytes:
        """What one rank contributes to the choice of a token: a hash of all that it read."""
        return _WORD.pack(xxhash.xxh3_64_intdigest(entries + row))

    def expected_token(self, digests: Words, position: int) -> int:
        """The token at ``position`` after a prefix with these words, if every byte read is right."""
        zero = bytes(ENTRY_BYTES)
        parts = [
            self.condense(self.entries(digests, rank), self.row_after(zero, digests, rank) if self.has_rows else b"")
            for rank in range(self.world_size)
        ]
        return choose_token(parts, position, self.vocab_size)
