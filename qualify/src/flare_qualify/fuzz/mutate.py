"""Seeded mutation of byte strings, for where no coverage-guided engine runs. Knows no target."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

__all__ = ["Mutator"]

_EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 1 << 20, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 1 << 40)


class Mutator:
    """Makes a new input of one or two known ones; the same seed makes the same inputs."""

    def __init__(self, seed: int, words: Sequence[bytes], max_bytes: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  reproducible, and nothing secret
        self._words = words
        self._max_bytes = max_bytes
        self._ways: tuple[Callable[[bytearray, Sequence[bytes]], None], ...] = (
            self._flip,
            self._set,
            self._edge,
            self._insert,
            self._delete,
            self._repeat,
            self._splice,
            self._word,
        )

    def fresh(self) -> bytes:
        """Random bytes, mostly few."""
        return self._random.randbytes(int(self._random.paretovariate(0.7)) * 8 % self._max_bytes)

    def mutated(self, pool: Sequence[bytes]) -> bytes:
        """One of ``pool``, changed in a few places; at times something new."""
        if not pool or self._random.random() < 0.02:
            return self.fresh()
        data = bytearray(self._random.choice(pool))
        for _ in range(1 << self._random.randrange(5)):
            self._random.choice(self._ways)(data, pool)
        return bytes(data[: self._max_bytes])

    def _place(self, data: bytearray, num_bytes: int = 1) -> int:
        return self._random.randrange(max(1, len(data) - num_bytes + 1))

    def _flip(self, data: bytearray, _: Sequence[bytes]) -> None:
        if data:
            data[self._place(data)] ^= 1 << self._random.randrange(8)

    def _set(self, data: bytearray, _: Sequence[bytes]) -> None:
        if data:
            data[self._place(data)] = self._random.randrange(256)

    def _edge(self, data: bytearray, _: Sequence[bytes]) -> None:
        size = self._random.choice((1, 2, 4, 8))
        value = (self._random.choice(_EDGES) + self._random.choice((-1, 0, 1))) % (1 << 8 * size)
        at = self._place(data, size)
        data[at : at + size] = value.to_bytes(size, self._random.choice(("little", "big")))

    def _insert(self, data: bytearray, _: Sequence[bytes]) -> None:
        at = self._random.randrange(len(data) + 1)
        data[at:at] = self._random.randbytes(self._random.randrange(1, 9))

    def _delete(self, data: bytearray, _: Sequence[bytes]) -> None:
        at = self._place(data)
        del data[at : at + self._random.randrange(1, 17)]

    def _repeat(self, data: bytearray, _: Sequence[bytes]) -> None:
        at = self._place(data)
        piece = bytes(data[at : at + self._random.randrange(1, 33)])
        data[at:at] = piece * self._random.choice((1, 1, 1, 2, 8))

    def _splice(self, data: bytearray, pool: Sequence[bytes]) -> None:
        other = self._random.choice(pool)
        if other:
            start = self._random.randrange(len(other))
            at = self._random.randrange(len(data) + 1)
            data[at:] = other[start:]

    def _word(self, data: bytearray, pool: Sequence[bytes]) -> None:
        if not self._words:
            self._splice(data, pool)
            return
        word = self._random.choice(self._words)
        at = self._random.randrange(len(data) + 1)
        data[at : at + (len(word) if self._random.random() < 0.5 else 0)] = word
