"""Puts one step plan together and moves the sequences that take part in it forward.

Copies of one plan do not depend on their order: what they read from is held until the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from flare_core.engine.device_cache import DeviceCache
from flare_core.engine.sequence import Sequence
from flare_core.plan import PageCopy, RowCopy, Run, RunKind, SequenceStart, StepPlan

__all__ = ["PlanBuilder", "PlannedStep"]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What the scheduler keeps of a plan until its result comes.

    Attributes:
        step: its number.
        members: sequences with a run in it.
        sampled: (sequence, its slot, kind) of the runs that sample, in the plan's order.
        prompt_runs: (sequence, start) by slot of the runs of sequences with prompt log-probabilities.
    """

    step: int
    members: tuple[Sequence, ...]
    sampled: tuple[tuple[Sequence, int, RunKind], ...]
    prompt_runs: dict[int, tuple[Sequence, int]]

    @property
    def only_decodes(self) -> bool:
        """No prompt is computed in it."""
        return len(self.sampled) == len(self.members) and all(kind is not RunKind.FIRST for *_, kind in self.sampled)


class PlanBuilder:
    """Collects the parts of plan ``step``."""

    def __init__(self, step: int, cache: DeviceCache) -> None:
        self.step = step
        self.num_decodes = 0
        self._cache = cache
        self._row_copies: list[RowCopy] = []
        self._page_copies: list[PageCopy] = []
        self._starts: list[SequenceStart] = []
        self._runs: list[Run] = []
        self._members: list[Sequence] = []
        self._sampled: list[tuple[Sequence, int, RunKind]] = []
        self._prompt_runs: dict[int, tuple[Sequence, int]] = {}
        self._late_pages: list[int] = []
        self._late_snapshots: list[int] = []
        self._late_rows: list[tuple[Sequence, int, int]] = []
        self._late_slots: list[int] = []
        self._row_sources: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Nothing to execute."""
        return not (self._runs or self._page_copies or self._row_copies)

    @property
    def has_copies(self) -> bool:
        """This step writes pages or rows by copies."""
        return bool(self._page_copies or self._row_copies)

    @property
    def late_slots(self) -> set[int]:
        """Sequence slots that stay taken until the next plan."""
        return set(self._late_slots)

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copy before the runs; ``source`` is held until the next plan."""
        self._cache.pool.acquire((source,))
        self._late_pages.append(source)
        self._page_copies.append(PageCopy(source, target, num_tokens))

    def take_snapshot(self, sequence: Sequence, num_tokens: int, slot: int) -> None:
        """Copy the sequence's row, now at ``num_tokens``, to ``slot``, which is held; later plans may start from it."""
        self._row_sources.add(sequence.slot)
        self._row_copies.append(RowCopy(sequence.slot, slot))
        self._late_snapshots.append(slot)
        self._late_rows.append((sequence, num_tokens, slot))

    def release_page_later(self, page: int) -> None:
        """Release a page that this plan copies to."""
        self._late_pages.append(page)

    def free_slot(self, slot: int) -> None:
        """Free a sequence's slot: at once, or with the next plan where this one still reads its row."""
        if slot in self._row_sources:
            self._late_slots.append(slot)
        else:
            self._cache.rows.free_sequence(slot)

    def add_run(self, sequence: Sequence, kind: RunKind, num_tokens: int) -> None:
        """Compute the sequence's next ``num_tokens`` tokens, with whatever must precede its first run.

        How many of a VERIFY run count is known with its result.
        """
        start = sequence.num_computed
        if sequence.start_needed:
            self._begin(sequence)
        num_pages = sequence.num_pages_for(start + num_tokens)
        new_pages: tuple[int, ...] = ()
        if num_pages > sequence.num_sent_pages:
            new_pages = tuple(sequence.pages[sequence.num_sent_pages : num_pages])
            sequence.num_sent_pages = num_pages
        self._runs.append(Run(sequence.slot, kind, start, num_tokens, new_pages))
        self._members.append(sequence)
        if kind is RunKind.VERIFY:
            sequence.is_verifying = True
        else:
            sequence.num_computed = start + num_tokens
        sequence.num_in_flight += 1
        sequence.last_step = self.step
        if kind is not RunKind.PREFILL:
            self._sampled.append((sequence, sequence.slot, kind))
            sequence.num_pending += 1
            self.num_decodes += kind is not RunKind.FIRST
        if not sequence.reads_cache:
            self._prompt_runs[sequence.slot] = (sequence, start)

    def _begin(self, sequence: Sequence) -> None:
        sequence.start_needed = False
        if sequence.copy_source >= 0:
            target = sequence.pages[sequence.num_computed // sequence.page_tokens]
            self._page_copies.append(PageCopy(sequence.copy_source, target, sequence.num_copied))
            self._late_pages.append(sequence.copy_source)
            sequence.copy_source = -1
        if sequence.row_source is not None:
            self._row_copies.append(RowCopy(sequence.row_source, sequence.slot))
            if sequence.row_source >= 0:
                self._late_snapshots.append(sequence.row_source)
            sequence.row_source = None
        tokens = sequence.tokens.bytes(0, len(sequence.tokens))
        params = sequence.request.params
        self._starts.append(SequenceStart(sequence.slot, tokens, sequence.num_prompt_tokens, params))

    def build(self, needs_jobs: Ordered[int]) -> tuple[StepPlan, PlannedStep]:
        """The plan, and what to remember of it."""
        plan = StepPlan(
            step=self.step,
            needs_jobs=tuple(needs_jobs),
            row_copies=tuple(self._row_copies),
            page_copies=tuple(self._page_copies),
            starts=tuple(self._starts),
            runs=tuple(self._runs),
        )
        return plan, PlannedStep(self.step, tuple(self._members), tuple(self._sampled), self._prompt_runs)

    def release_late(self) -> None:
        """The plan was handed out, the next one begins: learn the rows it keeps, let go of what it copies between."""
        for sequence, num_tokens, slot in self._late_rows:
            self._cache.register_row(sequence, num_tokens, slot)
        self._cache.release(self._late_pages)
        for slot in self._late_snapshots:
            self._cache.rows.drop(slot)
        for slot in self._late_slots:
            self._cache.rows.free_sequence(slot)
        self._late_rows.clear()
        self._late_pages.clear()
        self._late_snapshots.clear()
        self._late_slots.clear()
