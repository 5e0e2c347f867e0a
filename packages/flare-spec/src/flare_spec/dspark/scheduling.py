"""How many drafted tokens to verify: a fixed threshold, or a budget by measured cost shared over all sequences.

Pure arithmetic over confidences; loads no torch. Whether token k of a sequence is verified may depend only on what was
known before that token was drawn, or the output's distribution changes (DSpark, arXiv 2607.05147, gives an example).
The confidence of token k is such a thing, those of later tokens are not. So budgets are chosen from confidences of
earlier rounds, and shared by rank of the current survival probabilities, which never rise along a block.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CostTable", "choose_budget", "select_lengths", "static_length", "survivals"]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured seconds of a target step by its number of tokens; both increasing in length, at least one entry.

    Between measurements the cost is interpolated, beyond the last it goes on at the last slope (one measurement alone
    is the cost of everything).
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def cost(self, num_tokens: int) -> float:
        """Seconds of a step of ``num_tokens``."""
        if len(self.num_tokens) == 1 or num_tokens <= self.num_tokens[0]:
            return self.seconds[0]
        upper = min(bisect.bisect_left(self.num_tokens, num_tokens), len(self.num_tokens) - 1)
        span = self.num_tokens[upper] - self.num_tokens[upper - 1]
        slope = (self.seconds[upper] - self.seconds[upper - 1]) / span
        return self.seconds[upper - 1] + slope * (num_tokens - self.num_tokens[upper - 1])


def static_length(confidences: Sequence[float], threshold: float) -> int:
    """Tokens before the first whose confidence is below ``threshold``; 0 takes all, a NaN counts as below."""
    return sum(1 for _ in itertools.takewhile(lambda value: value >= threshold, confidences))


def survivals(confidences: Sequence[float]) -> list[float]:
    """Probability that each drafted token and all before it are accepted: products of confidences, never rising."""
    clean = (0.0 if math.isnan(value) else min(max(value, 0.0), 1.0) for value in confidences)
    return list(itertools.accumulate(clean, lambda product, value: product * value))


def choose_budget(
    earlier: Sequence[Sequence[float]], *, num_sequences: int, target: CostTable, draft_seconds: float
) -> int:
    """Drafted tokens to verify in a step, over all sequences, for the most tokens a second; 0: better not to draft.

    ``earlier`` holds confidences of an earlier round, one sequence each: the current ones would say something of
    tokens already drawn. A step of n sequences and b drafted tokens yields n plus the b greatest survival
    probabilities, in ``draft_seconds`` and the target's time for n + b tokens; without drafting it yields n.
    """
    gains = sorted(itertools.chain.from_iterable(survivals(each) for each in earlier), reverse=True)
    best_budget, best_rate = 0, num_sequences / target.cost(num_sequences)
    yielded = float(num_sequences)
    for budget, gain in enumerate(gains, start=1):
        yielded += gain
        rate = yielded / (draft_seconds + target.cost(num_sequences + budget))
        if rate > best_rate:
            best_budget, best_rate = budget, rate
    return best_budget


def select_lengths(confidences: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Drafted tokens of each sequence to verify, ``budget`` in all at most: those likeliest to be reached.

    Ordered by falling survival probability, then by place in the block, then by sequence. Within a block no token
    comes before an earlier one, equal probabilities included, so a length never depends on what lies behind it.
    """
    ranked = sorted(
        (-survival, place, sequence)
        for sequence, values in enumerate(confidences)
        for place, survival in enumerate(survivals(values))
    )
    lengths = [0] * len(confidences)
    for _, _, sequence in ranked[:budget]:
        lengths[sequence] += 1
    return lengths
