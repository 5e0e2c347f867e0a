"""Which conversations are in which training step: a function of seed and step, so that a run can go on anywhere.

Every epoch has every conversation once, in batches of similar length in a random order. Knows no tensors.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["batches_from"]

_POOL: Final = 16
"""Batches that are drawn together and sorted by length within: less padding, and still mixed."""


def batches_from(lengths: Sequence[int], *, batch_size: int, seed: int, step: int) -> Iterator[list[int]]:
    """Indices into ``lengths`` of each step from ``step`` on, without end. There is at least one conversation.

    A rest of an epoch that fills no batch is left out, unless the whole epoch would be.
    """
    per_epoch = max(1, len(lengths) // batch_size)
    while True:
        epoch, first = divmod(step, per_epoch)
        for batch in _epoch(lengths, batch_size, random.Random(f"{seed}/{epoch}"))[first:per_epoch]:
            yield batch
            step += 1


def _epoch(lengths: Sequence[int], batch_size: int, chance: random.Random) -> list[list[int]]:
    order = list(range(len(lengths)))
    chance.shuffle(order)
    order = order[: max(1, len(order) // batch_size) * batch_size]
    batches: list[list[int]] = []
    for start in range(0, len(order), batch_size * _POOL):
        pool = sorted(order[start : start + batch_size * _POOL], key=lambda index: lengths[index])
        batches += [pool[at : at + batch_size] for at in range(0, len(pool), batch_size)]
    chance.shuffle(batches)
    return batches
