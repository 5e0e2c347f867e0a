"""The oracle model's runner: executes step plans so that texts depend on every byte of every page and row attached.

One rank condenses its own bytes; what all ranks condensed decides the token. It checks that a plan is executable
(page tables long enough, no gaps), and knows nothing of requests, schedulers or transfers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flare_core.keys import TokenIds
from flare_core.plan import Run, RunKind, SampledToken, SequenceStart, StepPlan, StepResult, TokenLogprobs
from flare_core.ports import Collective
from flare_core.testing.oracle_config import OracleConfig
from flare_core.testing.oracle_math import (
    Floats,
    Words,
    combine_ranks,
    entry_bytes,
    mix_int,
    page_term,
    prefix_digests,
    row_delta,
    score_bias,
    scores,
)
from flare_core.testing.oracle_memory import OracleMemory
from flare_core.testing.oracle_sampling import choose_token, token_logprobs

__all__ = ["FinishedStep", "OracleGroup", "OracleRunner"]

_DIGEST_BYTES = 8
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was complete when it was launched."""

    value: StepResult

    def result(self) -> StepResult:
        """What the step gave; never blocks."""
        return self.value


@dataclass(slots=True)
class _Slot:
    """One sequence as this rank sees it; ``digests[p]`` condenses the known tokens up to position p."""

    start: SequenceStart
    token_ids: TokenIds
    digests: Words
    prompt_counts: NDArray[np.int64]
    output_counts: NDArray[np.int64]
    num_outputs: int
    page_table: list[int] = field(default_factory=list)
    last_token: int = -1
    last_position: int = -1
    last_digest: int = 0
    page_digests: list[int] = field(default_factory=list)
    page_sum: int = 0


class OracleRunner:
    """One rank. ``sleep`` is what ``prefill_cost_seconds`` is spent with."""

    def __init__(
        self,
        config: OracleConfig,
        memory: OracleMemory,
        collective: Collective,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self.memory = memory
        self._collective = collective
        self._sleep = sleep
        self._page_tokens = memory.geometry.page_tokens
        self._slots: dict[int, _Slot] = {}
        self._bias = score_bias(config)
        self._last_step = 0

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Execute ``plan`` at once; blocks until every rank has computed it."""
        part = self.compute(plan)
        gathered = self._collective.all_gather(part) if part else [part]
        return FinishedStep(self.finish(plan, gathered))

    def compute(self, plan: StepPlan) -> bytes:
        """First half of a step: pages and rows are written; this rank's digests, one for each score to be made.

        Raises:
            RuntimeError: the plan cannot be executed; the scheduler that made it is wrong.
        """
        if plan.step != self._last_step + 1:
            msg = f"plan {plan.step} follows step {self._last_step}; steps are numbered without gaps"
            raise RuntimeError(msg)
        self._last_step = plan.step
        _require_independent("page", [(copy.source, copy.target) for copy in plan.page_copies])
        _require_independent("row", [(copy.source, copy.target) for copy in plan.row_copies])
        for row in plan.row_copies:
            self.memory.copy_row(row.source, row.target)
        for copy in plan.page_copies:
            self.memory.copy_page(copy.source, copy.target, copy.num_tokens)
        for start in plan.starts:
            self._slots[start.slot] = self._begin(start)
        return b"".join(self._run(run) for run in plan.runs)

    def finish(self, plan: StepPlan, gathered: Sequence[bytes]) -> StepResult:
        """Second half: tokens from every rank's digests of this step, by rank."""
        tokens: list[SampledToken] = []
        prompt: list[tuple[int, tuple[TokenLogprobs, ...]]] = []
        at = 0
        for run in plan.runs:
            slot = self._slots[run.slot]
            count = self._num_digests(run)
            words = [
                combine_ranks([part[at + 8 * i : at + 8 * i + 8] for part in gathered], run.start + 1 + i)
                for i in range(count)
            ]
            at += count * _DIGEST_BYTES
            if run.kind is not RunKind.PREFILL:
                tokens.append(self._sample(run, slot, scores(words[0], self._bias)))
            elif count:
                entries = tuple(self._prompt_entry(slot, run.start + 1 + i, word) for i, word in enumerate(words))
                prompt.append((run.slot, entries))
        return StepResult(step=plan.step, tokens=tuple(tokens), prompt_logprobs=tuple(prompt))

    def _begin(self, start: SequenceStart) -> _Slot:
        token_ids = np.frombuffer(start.token_ids, dtype="<u4")
        size = self.config.vocab_size
        outputs = token_ids[start.num_prompt_tokens :]
        return _Slot(
            start=start,
            token_ids=token_ids,
            digests=prefix_digests(token_ids, start=0, before=0, seed=self.config.seed),
            prompt_counts=np.bincount(token_ids[: start.num_prompt_tokens], minlength=size).astype(np.int64),
            output_counts=np.bincount(outputs, minlength=size).astype(np.int64),
            num_outputs=len(outputs),
        )

    def _num_digests(self, run: Run) -> int:
        if run.kind is not RunKind.PREFILL:
            return 1
        start = self._slots[run.slot].start
        if start.params.prompt_logprobs is None:
            return 0
        return max(0, min(run.start + run.num_tokens, start.num_prompt_tokens - 1) - run.start)

    def _run(self, run: Run) -> bytes:
        slot = self._slots[run.slot]
        slot.page_table.extend(run.new_pages)
        digests = self._run_digests(run, slot)
        stop = run.start + run.num_tokens
        if len(slot.page_table) * self._page_tokens < stop:
            msg = f"step {self._last_step}: slot {run.slot} has {len(slot.page_table)} pages for {stop} tokens"
            raise RuntimeError(msg)
        if run.kind is RunKind.PREFILL:
            self._sleep(run.num_tokens * self.config.prefill_cost_seconds)
            count = self._num_digests(run)
            parts = []
            for i in range(count):
                self._write(slot, run.start + i, digests[i : i + 1])
                parts.append(self._digest(slot, run.start + i + 1))
            self._write(slot, run.start + count, digests[count:])
            return b"".join(parts)
        self._write(slot, run.start, digests)
        slot.last_position, slot.last_digest = run.start, int(digests[-1])
        if run.kind is RunKind.FIRST:
            slot.page_digests.clear()
            slot.page_sum = 0
        else:
            self._recheck(slot, run.start)
        return self._digest(slot, stop)

    def _run_digests(self, run: Run, slot: _Slot) -> Words:
        """Prefix digests of the run's tokens; for a DECODE run of the slot's last sampled token."""
        if run.kind is RunKind.DECODE:
            if run.start != slot.last_position + 1 or slot.last_token < 0:
                msg = f"step {self._last_step}: decode at {run.start} follows position {slot.last_position}"
                raise RuntimeError(msg)
            token = np.array([slot.last_token], dtype="<u4")
            return prefix_digests(token, start=run.start, before=slot.last_digest, seed=self.config.seed)
        stop = run.start + run.num_tokens
        if stop > len(slot.token_ids) or (run.kind is RunKind.FIRST and stop != len(slot.token_ids)):
            msg = f"step {self._last_step}: {run.kind.name} [{run.start}, {stop}) of {len(slot.token_ids)} known tokens"
            raise RuntimeError(msg)
        return slot.digests[run.start : stop]

    def _write(self, slot: _Slot, start: int, digests: Words) -> None:
        """Write the pages and the row of the tokens with these digests, which stand at ``start``."""
        if not len(digests):
            return
        geometry = self.memory.geometry
        for index, plane in enumerate(geometry.planes):
            span = plane.tokens_per_entry
            first, stop = start // span, (start + len(digests)) // span
            ends = digests[(first + 1) * span - 1 - start :: span]
            data = entry_bytes(ends, rank=geometry.rank, plane=index, num_bytes=self.memory.entry_bytes(index))
            per_page = self._page_tokens // span
            at = first
            while at < stop:
                upto = min(stop, (at // per_page + 1) * per_page)
                page = slot.page_table[at // per_page]
                self.memory.write_entries(page, index, at % per_page, data[at - first : upto - first])
                at = upto
        if geometry.row_bytes:
            row = self.memory.rows[slot.start.slot, : geometry.row_bytes]
            row += row_delta(digests, rank=geometry.rank, num_bytes=geometry.row_bytes)

    def _digest(self, slot: _Slot, num_tokens: int) -> bytes:
        """Digest of every byte attached for the first ``num_tokens`` tokens: whole pages once, the last one anew."""
        num_closed, rest = divmod(num_tokens, self._page_tokens)
        for index in range(len(slot.page_digests), num_closed):
            digest = self.memory.page_digest(slot.page_table[index], self._page_tokens)
            slot.page_digests.append(digest)
            slot.page_sum += page_term(index, digest)
        total = slot.page_sum
        if rest:
            total += page_term(num_closed, self.memory.page_digest(slot.page_table[num_closed], rest))
        row = self.memory.row_digest(slot.start.slot)
        return mix_int((total ^ mix_int(row)) & _MASK).to_bytes(_DIGEST_BYTES, "little")

    def _recheck(self, slot: _Slot, position: int) -> None:
        """Read one whole page again, another one each time, so that a late write to an attached page is seen."""
        if slot.page_digests:
            index = position % len(slot.page_digests)
            digest = self.memory.page_digest(slot.page_table[index], self._page_tokens)
            slot.page_sum += page_term(index, digest) - page_term(index, slot.page_digests[index])
            slot.page_digests[index] = digest

    def _sample(self, run: Run, slot: _Slot, logits: Floats) -> SampledToken:
        params = slot.start.params
        token = choose_token(
            logits,
            params,
            position=run.start + 1,
            num_outputs=slot.num_outputs,
            prompt_counts=slot.prompt_counts,
            output_counts=slot.output_counts,
        )
        slot.last_token = token
        slot.output_counts[token] += 1
        slot.num_outputs += 1
        logprobs = None if params.logprobs is None else token_logprobs(logits, token, params.logprobs)
        return SampledToken(slot=run.slot, token_id=token, logprobs=logprobs)

    def _prompt_entry(self, slot: _Slot, position: int, word: int) -> TokenLogprobs:
        num_top = slot.start.params.prompt_logprobs or 0
        return token_logprobs(scores(word, self._bias), int(slot.token_ids[position]), num_top)


def _require_independent(kind: str, copies: Sequence[tuple[int, int]]) -> None:
    """A device may run the copies of one plan in any order, so none may touch another's target."""
    targets = [target for _, target in copies]
    if len(set(targets)) < len(targets) or not {source for source, _ in copies}.isdisjoint(targets):
        msg = f"{kind} copies {copies} of one plan depend on their order"
        raise RuntimeError(msg)


class OracleGroup:
    """All ranks in one thread, in lockstep: a ``ModelRunner`` for simulators and references.

    With ``is_late`` a step is executed when its result is asked for, and not before: like a device that lags as far
    behind as it may, so that what is planned on the strength of steps that have not run yet is seen.
    """

    def __init__(self, runners: Sequence[OracleRunner], *, is_late: bool = False) -> None:
        self.runners = runners
        self._is_late = is_late
        self._waiting: deque[_LateStep] = deque()

    def launch(self, plan: StepPlan) -> _LateStep:
        """Accept ``plan``; see ``is_late``.

        Raises:
            RuntimeError: the ranks' results differ, or the plan cannot be executed.
        """
        step = _LateStep(self, plan)
        self._waiting.append(step)
        if not self._is_late:
            step.result()
        return step

    def execute_until(self, last: _LateStep) -> None:
        """Execute what waits, in order, up to and including ``last``."""
        while last.value is None:
            step = self._waiting.popleft()
            parts = [runner.compute(step.plan) for runner in self.runners]
            results = [runner.finish(step.plan, parts) for runner in self.runners]
            if any(result != results[0] for result in results):
                msg = f"step {step.plan.step}: ranks disagree"
                raise RuntimeError(msg)
            step.value = results[0]


@dataclass(slots=True)
class _LateStep:
    group: OracleGroup
    plan: StepPlan
    value: StepResult | None = None

    def result(self) -> StepResult:
        """What the step gave, executed now if it was not before."""
        self.group.execute_until(self)
        if self.value is None:
            raise AssertionError("a step was executed without a result")
        return self.value
