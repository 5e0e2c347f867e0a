"""Runs that sample, as rows of a batch: which positions they compute, and which rows' tokens count. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flare_core.plan import Run, RunKind

__all__ = ["SampledRows", "accepted_rows", "counted_rows", "plan_order"]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """A FIRST, DECODE or VERIFY run: one row for the slot's last token, and one for each draft behind it."""

    run: Run
    drafts: tuple[int, ...] = ()

    @property
    def positions(self) -> range:
        """Of its rows."""
        return range(self.run.start, self.run.start + 1 + len(self.drafts))


def accepted_rows(sampled: Sequence[SampledRows], tokens: Sequence[int]) -> list[range]:
    """For each run the rows whose tokens are decided; ``tokens`` were chosen behind each row.

    A row's token is what would be chosen without drafts as long as the drafts before it are what was chosen.
    """
    kept: list[range] = []
    at = 0
    for each in sampled:
        count = 1
        while count <= len(each.drafts) and tokens[at + count - 1] == each.drafts[count - 1]:
            count += 1
        kept.append(range(at, at + count))
        at += 1 + len(each.drafts)
    return kept


def counted_rows(sampled: Sequence[SampledRows], num_accepted: Sequence[int]) -> list[range]:
    """The same where it was counted how many drafts of each run are kept."""
    kept: list[range] = []
    at = 0
    for each, count in zip(sampled, num_accepted, strict=True):
        kept.append(range(at, at + 1 + count))
        at += 1 + len(each.drafts)
    return kept


def plan_order(runs: Sequence[Run], sampled: Sequence[SampledRows]) -> list[int]:
    """Where each sampling run of the plan stands in ``sampled``."""
    place = {id(each.run): index for index, each in enumerate(sampled)}
    return [place[id(run)] for run in runs if run.kind is not RunKind.PREFILL]
