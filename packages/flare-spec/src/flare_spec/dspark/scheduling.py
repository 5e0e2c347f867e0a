"""How many tokens of a drafted block are worth verifying, by the drafter's own confidences. Pure; loads no torch.

Whether token k is verified may depend only on what was known before that token was drawn, or the output's distribution
changes (DSpark, arXiv 2607.05147, gives an example). The confidence of token k is such a thing, those of later tokens
are not. How many tokens a step may verify at all is planned before anything is drafted, by measured costs
(:mod:`flare_core.engine.speculation`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["static_length"]


def static_length(confidences: Sequence[float], threshold: float) -> int:
    """Tokens before the first whose confidence is below ``threshold``; 0 takes all, a NaN counts as below."""
    return sum(1 for _ in itertools.takewhile(lambda value: value >= threshold, confidences))
