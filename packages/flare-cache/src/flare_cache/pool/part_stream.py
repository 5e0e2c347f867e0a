"""The bytes of a part as they come in pieces: digested item by item, and copied on. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from flare_cache.digest import ROW_INDEX, digest_of
from flare_cache.host_memory import copy_views
from flare_cache.record import Problem, RecordError, RecordHeader
from flare_cache.transfer import Item, Part

__all__ = ["Filling", "PartDigests"]


class Filling:
    """Memory that is filled from its beginning on."""

    def __init__(self, targets: Sequence[memoryview]) -> None:
        self._targets = [view for view in targets if len(view)]

    def append(self, piece: memoryview) -> None:
        """The next bytes."""
        while piece:
            target = self._targets[0]
            step = min(len(target), len(piece))
            copy_views([target[:step]], [piece[:step]])
            piece = piece[step:]
            if step == len(target):
                self._targets.pop(0)
            else:
                self._targets[0] = target[step:]


class PartDigests:
    """Digests of a part's items, fed with pieces that know nothing of where items end."""

    def __init__(self, header: RecordHeader, rank: int, part: Part) -> None:
        self._header = header
        self._rank = rank
        self._part = part
        self._number = 0
        self._left = part[0].num_bytes
        self._digest = self._begin()

    def _begin(self) -> xxhash.xxh3_128:
        return digest_of(self._header.identity.store_id, self._rank, index=self._part[self._number].index)

    def update(self, piece: memoryview) -> None:
        """The next bytes of the part. Raises RecordError when an item that they end is not what it should be."""
        while piece:
            step = min(self._left, len(piece))
            self._digest.update(piece[:step])
            piece, self._left = piece[step:], self._left - step
            if not self._left:
                self._check(self._part[self._number])
                self._number += 1
                if self._number < len(self._part):
                    self._left = self._part[self._number].num_bytes
                    self._digest = self._begin()

    def _check(self, item: Item) -> None:
        if self._digest.digest() != self._header.digest_at(item.position):
            name = "the row" if item.index == ROW_INDEX else f"section {item.index}"
            raise RecordError(Problem.SECTION_DIGEST, f"{name} of {self._header.identity.key.hex()[:16]} in the pool")

    def verify(self) -> None:
        """Every item was seen whole."""
        assert self._number == len(self._part)  # noqa: S101 - the range was as long as its items
