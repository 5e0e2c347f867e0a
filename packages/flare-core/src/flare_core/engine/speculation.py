"""How many tokens to draft for each sequence of a step. Pure: acceptance and step times go in, lengths come out.

Rank zero decides before anything is drafted, from what earlier steps gave, so that a decision never depends on the
tokens that it is about. A draft is worth its row if the tokens a second that are expected rise; what a step of so many
rows takes is measured. The search is over all numbers of rows, not up to the first that does not pay, because costs
rise in stairs (DSpark, arXiv:2607.05147, section on confidence-scheduled verification).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

__all__ = ["AcceptanceEstimate", "DraftPlanner", "SpeculationLimits", "StepCosts"]

_PRIOR_ACCEPTED = 1.4
_PRIOR_DRAFTED = 2.0
_MEMORY = 0.8
"""Of an estimate, for each step that verified drafts: it follows a text that changes its kind."""
_FIRST_PROBE, _LAST_PROBE = 16, 512
"""A sequence without drafts is tried again after as many steps, and after twice as many each time in vain: where
drafting never pays, what trying costs is soon nothing."""
_PROBE_TOKENS = 2
_FASTER_WEIGHT, _SLOWER_WEIGHT = 0.5, 0.05
"""Of a measured step: what makes one slower is mostly something else on the machine, and soon over."""
_FIRST_SLOPE = 0.02
"""Of the time of one row, for each row more, until it was measured."""
_MIN_GAIN = 1.02
"""Drafting must promise this much more: estimates err, and a step without drafts costs less bookkeeping."""


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """What is allowed.

    Attributes:
        max_drafts: tokens drafted for one sequence in one step.
        max_rows: rows of a step, decodes and drafts, beyond which nothing is drafted.
    """

    max_drafts: int
    max_rows: int = 32


@dataclass(slots=True)
class AcceptanceEstimate:
    """Of one sequence: how likely a draft is accepted when those before it were."""

    num_accepted: float = _PRIOR_ACCEPTED
    num_decided: float = _PRIOR_DRAFTED
    num_idle_steps: int = 0
    probe_after: int = _FIRST_PROBE

    @property
    def rate(self) -> float:
        """Between 0 and 1."""
        return self.num_accepted / self.num_decided

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """A step has verified ``num_drafts``; what stands behind the first refused one says nothing."""
        if not num_drafts:
            return
        self.num_accepted = _MEMORY * self.num_accepted + num_accepted
        self.num_decided = _MEMORY * self.num_decided + num_accepted + (num_accepted < num_drafts)


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step by its rows: measured, and in between drawn straight."""

    _rows: list[int] = field(default_factory=list)
    _seconds: dict[int, float] = field(default_factory=dict)

    def measured(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows and nothing else took so long."""
        known = self._seconds.get(num_rows)
        if known is None:
            self._rows.insert(bisect_left(self._rows, num_rows), num_rows)
            self._seconds[num_rows] = seconds
        else:
            weight = _FASTER_WEIGHT if seconds < known else _SLOWER_WEIGHT
            self._seconds[num_rows] = known + weight * (min(seconds, 2 * known) - known)

    def of(self, num_rows: int) -> float:
        """What a step of so many rows should take, relative to others."""
        at = bisect_left(self._rows, num_rows)
        if at < len(self._rows) and self._rows[at] == num_rows:
            return self._seconds[num_rows]
        if not self._rows:
            return 1.0 + _FIRST_SLOPE * num_rows
        if at == 0:
            return self._seconds[self._rows[0]]
        below = self._rows[at - 1]
        if at == len(self._rows):
            return self._seconds[below] * (1.0 + _FIRST_SLOPE * (num_rows - below))
        above = self._rows[at]
        share = (num_rows - below) / (above - below)
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])


@dataclass(slots=True)
class DraftPlanner:
    """See the module."""

    limits: SpeculationLimits
    costs: StepCosts = field(default_factory=StepCosts)

    def lengths(self, sequences: Ordered[tuple[AcceptanceEstimate, int]]) -> list[int]:
        """Drafts for each of the sequences that decode in a step: (its estimate, what it may have at all)."""
        num_rows = len(sequences)
        most = [min(allowed, self.limits.max_drafts) for _, allowed in sequences]
        heap = [(-estimate.rate, index) for index, (estimate, _) in enumerate(sequences) if most[index] > 0]
        heapq.heapify(heap)
        expected, admitted, num_best = float(num_rows), [0] * num_rows, 0
        best_rate = _MIN_GAIN * expected / self.costs.of(num_rows)
        order: list[int] = []
        while heap and num_rows + len(order) < self.limits.max_rows:
            # The chance that this draft and all before it are right; greatest first, so a sequence's come in order.
            negative, index = heapq.heappop(heap)
            expected -= negative
            order.append(index)
            admitted[index] += 1
            if admitted[index] < most[index]:
                heapq.heappush(heap, (negative * sequences[index][0].rate, index))
            rate = expected / self.costs.of(num_rows + len(order))
            if rate > best_rate:
                best_rate, num_best = rate, len(order)
        lengths = [0] * num_rows
        for index in order[:num_best]:
            lengths[index] += 1
        self._probe(lengths, sequences, most)
        return lengths

    def _probe(
        self, lengths: list[int], sequences: Ordered[tuple[AcceptanceEstimate, int]], most: Ordered[int]
    ) -> None:
        """What is not drafted for is tried again now and then: texts change."""
        for index, (estimate, _) in enumerate(sequences):
            if lengths[index]:
                estimate.num_idle_steps, estimate.probe_after = 0, _FIRST_PROBE
                continue
            estimate.num_idle_steps += 1
            room = self.limits.max_rows - len(lengths) - sum(lengths)
            if estimate.num_idle_steps >= estimate.probe_after and min(most[index], room) > 0:
                lengths[index] = min(_PROBE_TOKENS, most[index], room)
                estimate.num_idle_steps, estimate.probe_after = 0, min(_LAST_PROBE, 2 * estimate.probe_after)
