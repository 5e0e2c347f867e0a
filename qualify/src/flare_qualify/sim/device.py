"""One rank's device: executes step plans in order, late, and reads every byte that a real model would attend to.

A step is launched when the jobs that it needs have ended here; it computes some time later, ends when every rank has
computed, and only then do pages, rows and the token belong to what comes next. Requests and schedulers are not known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flare_core.plan import Run, RunKind, SampledToken, SequenceStart, StepPlan, StepResult
from flare_qualify.sim.ledger import Ledger, StepUse, row_place
from flare_qualify.sim.loop import Violation
from flare_qualify.sim.memory import SimMemory
from flare_qualify.sim.model import ENTRY_BYTES, Model, Words, choose_token

__all__ = ["Device", "Exchange"]

_ZERO_ROW = bytes(ENTRY_BYTES)


@dataclass(slots=True)
class Exchange:
    """The collectives of one group: what each rank computed in each step, for all of them."""

    world_size: int
    parts: dict[int, dict[int, list[bytes]]] = field(default_factory=dict)

    def put(self, step: int, rank: int, parts: list[bytes]) -> bool:
        """A rank has computed a step; whether all have now."""
        gathered = self.parts.setdefault(step, {})
        gathered[rank] = parts
        return len(gathered) == self.world_size

    def all_of(self, step: int) -> list[list[bytes]]:
        """Every rank's parts, by rank."""
        gathered = self.parts[step]
        return [gathered[rank] for rank in range(self.world_size)]


@dataclass(slots=True)
class _Slot:
    start: SequenceStart
    digests: Words
    table: list[int] = field(default_factory=list)
    last_token: int = -1
    last_position: int = -1
    last_digest: int = 0


@dataclass(slots=True)
class Device:
    """One rank.

    Attributes:
        are_jobs_finished: whether jobs have ended on this rank.
        compute_after, finish_after: schedule the two moments of a launched step.
        on_computed: told (step, parts) when this rank has computed a step.
        on_finished: told the result when the step has ended here.
    """

    rank: int
    model: Model
    memory: SimMemory
    ledger: Ledger
    are_jobs_finished: Callable[[Sequence[int]], bool]
    compute_after: Callable[[Callable[[], None]], None]
    on_computed: Callable[[int, list[bytes]], None]
    on_finished: Callable[[StepResult], None]
    current: StepPlan | None = None
    waiting: deque[StepPlan] = field(default_factory=deque)
    last_step: int = 0
    _slots: dict[int, _Slot] = field(default_factory=dict)

    def submit(self, plan: StepPlan) -> None:
        """Execute ``plan`` after those before it."""
        self.waiting.append(plan)
        self.advance()

    def advance(self) -> None:
        """Launch the next step if it may begin."""
        if self.current is not None or not self.waiting or not self.are_jobs_finished(self.waiting[0].needs_jobs):
            return
        plan = self.waiting.popleft()
        if plan.step != self.last_step + 1:
            raise Violation("steps", f"rank {self.rank}: plan {plan.step} follows step {self.last_step}")
        self.last_step = plan.step
        self.current = plan
        self.ledger.step_begins(self._begin(plan), plan.needs_jobs)
        self.compute_after(self._compute)

    def _begin(self, plan: StepPlan) -> StepUse:
        """Take in starts and page tables; what the step touches."""
        reads: set[int] = set()
        writes: set[int] = set()
        begun: set[int] = set()
        for row in plan.row_copies:
            if row.source >= 0:
                reads.add(row_place(row.source))
            writes.add(row_place(row.target))
            begun.add(row_place(row.target))
        for page in plan.page_copies:
            reads.add(page.source)
            writes.add(page.target)
            begun.add(page.target)
        for start in plan.starts:
            self._slots[start.slot] = _Slot(start, self.model.digests(start.token_ids, start.params.seed))
        size = self.model.page_tokens
        for run in plan.runs:
            slot = self._slots[run.slot]
            slot.table.extend(run.new_pages)
            stop = run.start + run.num_tokens
            first, last = run.start // size, (stop - 1) // size
            if last >= len(slot.table):
                raise Violation("steps", f"step {plan.step}: {len(slot.table)} pages for {stop} tokens")
            touched = slot.table[first : last + 1]
            writes.update(touched)
            begun.update(touched if run.start % size == 0 else touched[1:])
            reads.update(slot.table[: last + 1])
            if self.model.has_rows:
                reads.add(row_place(run.slot))
                writes.add(row_place(run.slot))
        return StepUse(plan.step, frozenset(reads), frozenset(writes), frozenset(begun))

    def _compute(self) -> None:
        plan = self.current
        if plan is None:
            return
        memory = self.memory
        size, stride = memory.page_bytes, memory.row_stride
        for row in plan.row_copies:
            source = (
                memory.rows[row.source * stride : row.source * stride + stride] if row.source >= 0 else bytes(stride)
            )
            memory.rows[row.target * stride : row.target * stride + stride] = source
        for page in plan.page_copies:
            kept = ENTRY_BYTES * page.num_tokens
            whole = bytes(memory.pages[page.source * size : page.source * size + kept]) + bytes(size - kept)
            memory.pages[page.target * size : page.target * size + size] = whole
        parts = [part for run in plan.runs if (part := self._run(run)) is not None]
        self.on_computed(plan.step, parts)

    def _run(self, run: Run) -> bytes | None:
        """Write what the run computes; what its token is chosen by, where it samples one."""
        slot = self._slots[run.slot]
        model = self.model
        if run.kind is RunKind.DECODE:
            if run.start != slot.last_position + 1 or slot.last_token < 0:
                raise Violation("steps", f"decode at {run.start} follows position {slot.last_position}")
            digest = model.next_digest(slot.last_digest, slot.last_token, run.start)
            self._write(slot, run.start, model.entry(digest, self.rank))
            if model.has_rows:
                self._set_row(run.slot, model.row_after_one(self._row(run.slot), digest, self.rank))
        else:
            digests = slot.digests[run.start : run.start + run.num_tokens]
            if len(digests) != run.num_tokens:
                raise Violation("steps", f"{run.kind.name} up to {run.start + run.num_tokens} of {len(slot.digests)}")
            self._write(slot, run.start, model.entries(digests, self.rank))
            if model.has_rows:
                self._set_row(run.slot, model.row_after(self._row(run.slot), digests, self.rank))
            digest = int(digests[-1])
        if run.kind is RunKind.PREFILL:
            return None
        slot.last_position, slot.last_digest = run.start, digest
        return model.condense(self._read(slot, run.start + 1), self._row(run.slot) if model.has_rows else b"")

    def _row(self, slot: int) -> bytes:
        at = slot * self.memory.row_stride
        return bytes(self.memory.rows[at : at + ENTRY_BYTES])

    def _set_row(self, slot: int, row: bytes) -> None:
        at = slot * self.memory.row_stride
        self.memory.rows[at : at + ENTRY_BYTES] = row

    def _write(self, slot: _Slot, start: int, data: bytes) -> None:
        per_page = self.model.page_tokens * ENTRY_BYTES
        at, done = start * ENTRY_BYTES, 0
        while done < len(data):
            index, offset = divmod(at + done, per_page)
            step = min(len(data) - done, per_page - offset)
            begin = slot.table[index] * self.memory.page_bytes + offset
            self.memory.pages[begin : begin + step] = data[done : done + step]
            done += step

    def _read(self, slot: _Slot, num_tokens: int) -> bytes:
        size, per_page = self.memory.page_bytes, self.model.page_tokens * ENTRY_BYTES
        whole, rest = divmod(num_tokens * ENTRY_BYTES, per_page)
        pages = self.memory.pages
        pieces = [pages[page * size : page * size + per_page] for page in slot.table[:whole]]
        if rest:
            begin = slot.table[whole] * size
            pieces.append(pages[begin : begin + rest])
        return b"".join(pieces)

    def finish(self, gathered: Sequence[list[bytes]]) -> None:
        """Every rank has computed the current step: choose its tokens, and go on."""
        plan = self.current
        if plan is None:
            return
        tokens: list[SampledToken] = []
        sampling = [run for run in plan.runs if run.kind is not RunKind.PREFILL]
        for at, run in enumerate(sampling):
            slot = self._slots[run.slot]
            token = choose_token([parts[at] for parts in gathered], run.start + 1, self.model.vocab_size)
            slot.last_token = token
            tokens.append(SampledToken(slot=run.slot, token_id=token))
        self.current = None
        self.ledger.step_ends()
        self.on_finished(StepResult(step=plan.step, tokens=tuple(tokens)))
        self.advance()
