"""Acceptance of several drafters over the same conversations: by place, and with intervals. Pure; loads no torch.

Intervals are of the percentile bootstrap over conversations (Efron 1979); comparisons are paired: a resample draws
conversations, and takes both drafters' results of each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Interval", "Rounds", "Summary", "gain", "summarise"]

_RESAMPLES = 2000


class Rounds(Protocol):
    """Results of one conversation, as :class:`flare_spec.training.acceptance.Acceptance` says."""

    @property
    def num_rounds(self) -> int: ...

    @property
    def length(self) -> float: ...

    @property
    def reached(self) -> tuple[float, ...]: ...

    @property
    def accepted(self) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the bounds that 95 % of the resamples lie within."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One drafter.

    Attributes:
        length: mean tokens a round, over all rounds of all conversations.
        conditional: [gamma], chance that the k-th token is accepted if it is reached.
        survival: [gamma], chance that it is reached and accepted.
    """

    num_rounds: int
    length: Interval
    conditional: tuple[float, ...]
    survival: tuple[float, ...]


def summarise(results: Sequence[Rounds], *, seed: int = 0) -> Summary:
    """``results`` of at least one conversation that has a round."""
    places = range(len(results[0].reached))
    rounds = sum(each.num_rounds for each in results)
    reached = [sum(each.reached[place] for each in results) for place in places]
    accepted = [sum(each.accepted[place] for each in results) for place in places]
    return Summary(
        num_rounds=rounds,
        length=_bootstrap(len(results), lambda chosen: _length(results, chosen), seed),
        conditional=tuple(one / two if two else 0.0 for one, two in zip(accepted, reached, strict=True)),
        survival=tuple(each / rounds for each in accepted),
    )


def gain(results: Sequence[Rounds], other: Sequence[Rounds], *, seed: int = 0) -> Interval:
    """By how much ``results`` are longer than ``other``, of the same conversations in the same order: 0.05 is 5 %."""
    return _bootstrap(len(results), lambda chosen: _length(results, chosen) / _length(other, chosen) - 1, seed)


def _length(results: Sequence[Rounds], chosen: Sequence[int]) -> float:
    rounds = sum(results[index].num_rounds for index in chosen)
    return sum(results[index].num_rounds * results[index].length for index in chosen) / max(1, rounds)


def _bootstrap(count: int, statistic: Callable[[Sequence[int]], float], seed: int) -> Interval:
    chance = random.Random(seed)
    values = sorted(statistic(chance.choices(range(count), k=count)) for _ in range(_RESAMPLES))
    low, high = (values[round(share * (_RESAMPLES - 1))] for share in (0.025, 0.975))
    return Interval(statistic(range(count)), low, high)
