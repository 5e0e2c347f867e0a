"""Decisions read off an input's bytes, so that any engine that mutates bytes also mutates decisions.

Never runs out: past the end every integer is the least and every piece is empty, which lets an input end anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Choices"]

T = TypeVar("T")


class Choices:
    """A reader of one input."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_spent(self) -> bool:
        """Whether every byte was read."""
        return self._at >= len(self._data)

    def take(self, num_bytes: int) -> bytes:
        """The next bytes; fewer at the end."""
        piece = self._data[self._at : self._at + num_bytes]
        self._at += len(piece)
        return piece

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))

    def integer(self, least: int, most: int) -> int:
        """An integer of [least, most]."""
        span = max(1, most - least + 1)
        num_bytes = (span.bit_length() + 7) // 8
        return least + int.from_bytes(self.take(num_bytes), "little") % span

    def flag(self) -> bool:
        """True or false."""
        return self.integer(0, 1) == 1

    def pick(self, options: Sequence[T]) -> T:
        """One of ``options``."""
        return options[self.integer(0, len(options) - 1)]

    def piece(self, max_bytes: int) -> bytes:
        """A few bytes, at most ``max_bytes``."""
        return self.take(self.integer(0, max_bytes))
