"""How far two answers are apart: the total variation between their top log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flare_qualify.client import TopLogprobs

__all__ = ["total_variation"]


def total_variation(left: Sequence[TopLogprobs], right: Sequence[TopLogprobs]) -> float:
    """The largest total variation over positions: half the sum of |p - q| over the union of the alternatives.

    Alternatives that one side lacks count with probability 0 there. Sequences of different length are at distance 1.
    """
    if len(left) != len(right):
        return 1.0
    worst = 0.0
    for one, other in zip(left, right, strict=True):
        p, q = dict(one), dict(other)
        distance = 0.5 * sum(
            abs(math.exp(p.get(token, -math.inf)) - math.exp(q.get(token, -math.inf))) for token in p.keys() | q.keys()
        )
        worst = max(worst, distance)
    return worst
