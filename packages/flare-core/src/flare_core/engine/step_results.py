"""What a step's result gives each sequence. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flare_core.engine.plan_builder import PlannedStep
from flare_core.engine.sequence import Sequence
from flare_core.plan import RunKind, SampledToken, StepResult

__all__ = ["SequenceResult", "sequence_results"]


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a run gave.

    Attributes:
        decided: the tokens chosen, at least one. ``num_drafts``: None where none were asked for.
    """

    sequence: Sequence
    decided: tuple[SampledToken, ...]
    num_drafts: int | None

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """Those that count: behind one that ends the output nothing does, and nothing is kept."""
        for at, token in enumerate(self.decided):
            if token.token_id in self.sequence.stop_ids:
                return self.decided[: at + 1]
        return self.decided


def sequence_results(planned: PlannedStep, result: StepResult) -> list[SequenceResult]:
    """The result by sequence, in the plan's order."""
    tokens, num_drafts = deque(result.tokens), deque(result.num_drafts)
    results: list[SequenceResult] = []
    for sequence, slot, kind in planned.sampled:
        own = [tokens.popleft()]
        while tokens and tokens[0].slot == slot:
            own.append(tokens.popleft())
        drafted = num_drafts.popleft() if kind is RunKind.VERIFY else None
        results.append(SequenceResult(sequence, tuple(own), drafted))
    if tokens or num_drafts:
        raise AssertionError(f"step {result.step} gave tokens that nobody asked for")
    return results
