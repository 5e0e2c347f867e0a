"""Executes step plans on one rank: slots, page tables, forward passes, sampling.

Decides nothing. The runner keeps each slot's last token on the device, so that a plan may be launched before the
previous step's tokens are known to anyone. With a drafter it reads them at once, and keeps the drafts that are what
sampling chooses anyway: the text is the one without a drafter (the coupled rule, Daliri, Musco and Suresh 2024,
arXiv:2408.07978), unless the chooser says itself how many are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from flare_core.compute.attention import BatchRow, ChunkGroup, PagedAttention
from flare_core.compute.choosing import Chosen, GatheredRows, TokenChooser
from flare_core.compute.half_weights import MAX_ROWS
from flare_core.compute.kv_memory import KvMemory
from flare_core.compute.logprobs import RawLogprobs, raw_logprobs
from flare_core.compute.sampled_rows import SampledRows, accepted_rows, counted_rows, plan_order
from flare_core.compute.sampler import clean_
from flare_core.compute.sampling_state import SlotSampling, start_sampling
from flare_core.compute.sharded_model import ShardedModel, Taps
from flare_core.keys import TokenIds
from flare_core.plan import (
    Run,
    RunKind,
    SampledToken,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from flare_core.ports import Drafter

__all__ = ["NUMERICS", "TorchRunner"]

NUMERICS = 1
"""Version of the arithmetic; raised whenever the same model and tokens give other bits in a page."""

_LOGITS_ROWS = 128
"""Rows of logits made at once for prompt log-probabilities, which bounds their memory."""


@dataclass(slots=True)
class _Slot:
    """A sequence as the runner knows it."""

    token_ids: TokenIds
    sampling: SlotSampling
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """Log-probabilities of prompt tokens that one run gave."""

    slot: int
    num_top: int
    raw: RawLogprobs


@dataclass(frozen=True, slots=True)
class _TorchStep:
    """A launched step: its results, still on the device."""

    step: int
    slots: tuple[int, ...]
    tokens: torch.Tensor | None
    num_top: tuple[int | None, ...]
    raw: RawLogprobs | None
    prompt_parts: tuple[_PromptPart, ...]
    finished: torch.cuda.Event | None
    num_drafts: tuple[int, ...] = ()

    def result(self) -> StepResult:
        """Block until the device has finished the step; then what it gave."""
        if self.finished is not None:
            self.finished.synchronize()
        token_ids = [] if self.tokens is None else self.tokens.tolist()
        entries: Sequence[TokenLogprobs | None] = [None] * len(token_ids)
        if self.raw is not None:
            every = self.raw.entries([count or 0 for count in self.num_top])
            entries = [entry if count is not None else None for entry, count in zip(every, self.num_top, strict=True)]
        return StepResult(
            step=self.step,
            tokens=tuple(
                SampledToken(slot, token, entry)
                for slot, token, entry in zip(self.slots, token_ids, entries, strict=True)
            ),
            num_drafts=self.num_drafts,
            prompt_logprobs=tuple(
                (part.slot, tuple(part.raw.entries([part.num_top] * len(part.raw.token_ids))))
                for part in self.prompt_parts
            ),
        )


class TorchRunner:
    """:class:`flare_core.ports.ModelRunner` on torch. Used by the engine thread only.

    Attributes:
        model: the rank's model.
        memory: the rank's pages.
        drafter: guesses for VERIFY runs; without one they are DECODE runs.

    ``choose``: how tokens are chosen; by default from whole rows, gathered.
    """

    def __init__(
        self,
        model: ShardedModel,
        memory: KvMemory,
        attention: PagedAttention,
        *,
        max_sequences: int,
        drafter: Drafter | None = None,
        choose: TokenChooser | None = None,
    ) -> None:
        self.model = model
        self.memory = memory
        self.drafter = drafter
        self._attention = attention
        self._choose = choose or GatheredRows(model)
        self._device = memory.views.device
        self._slots: list[_Slot | None] = [None] * max_sequences
        self._last_tokens = torch.zeros(max_sequences, dtype=torch.int64, device=self._device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> _TorchStep:
        """Run ``plan``. Blocks on the CPU and for other ranks; on a device it queues what it can."""
        for copy in plan.page_copies:
            self.memory.copy_page(copy.source, copy.target, copy.num_tokens)
        for start in plan.starts:
            self._start(start)
        for run in plan.runs:
            self._slot(run.slot).pages.extend(run.new_pages)
        prompt_parts: list[_PromptPart] = []
        if prefill := [run for run in plan.runs if run.kind is RunKind.PREFILL]:
            prompt_parts.extend(self._prefill(prefill))
        first = [SampledRows(run) for run in plan.runs if run.kind is RunKind.FIRST]
        decode = self._drafted([run for run in plan.runs if run.kind in (RunKind.DECODE, RunKind.VERIFY)])
        taps: list[Taps] = []
        hidden = [self._sampling_rows(rows, taps) for rows in self._grouped(first, decode)]
        if not hidden:
            return _TorchStep(plan.step, (), None, (), None, tuple(prompt_parts), self._mark())
        sampled = first + decode
        chosen, raw = self._choose_rows(sampled, hidden)
        tokens = chosen.tokens
        if self.drafter is None:
            kept = [range(at, at + 1) for at in range(len(sampled))]
        else:
            counts = chosen.num_accepted
            kept = accepted_rows(sampled, tokens.tolist()) if counts is None else counted_rows(sampled, counts)
        self._remember(sampled, tokens, kept)
        self._observe_sampled(sampled, kept, taps)
        order = plan_order(plan.runs, sampled)
        where = [row for index in order for row in kept[index]]
        if where != list(range(len(tokens))):
            index = torch.tensor(where, device=self._device)
            tokens = tokens[index]
            raw = None if raw is None else raw.reordered(index)
        slots = tuple(sampled[index].run.slot for index in order for _ in kept[index])
        return _TorchStep(
            step=plan.step,
            slots=slots,
            tokens=tokens,
            num_top=tuple(self._slot(slot).sampling.params.logprobs for slot in slots),
            raw=raw,
            prompt_parts=tuple(prompt_parts),
            finished=self._mark(),
            num_drafts=tuple(len(sampled[at].drafts) for at in order if sampled[at].run.kind is RunKind.VERIFY),
        )

    def _mark(self) -> torch.cuda.Event | None:
        """The point that the device's queue has reached, for steps that give nothing to wait for; None on the CPU."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _slot(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise ValueError(f"the plan uses slot {slot}, which no sequence has taken")
        return state

    def _start(self, start: SequenceStart) -> None:
        token_ids = np.frombuffer(start.token_ids, dtype="<u4")
        sampling = start_sampling(
            start.params,
            token_ids,
            start.num_prompt_tokens,
            vocab_size=self.model.config.vocab_size,
            device=self._device,
        )
        self._slots[start.slot] = _Slot(token_ids, sampling)
        if self.drafter is not None:
            self.drafter.start(start.slot, token_ids, start.params)

    def _known(self, slot: _Slot, start: int, num_tokens: int) -> torch.Tensor:
        """Known tokens [start, start + num_tokens) as int64 on the device."""
        part = slot.token_ids[start : start + num_tokens]
        if len(part) != num_tokens:
            raise ValueError(f"the plan computes tokens up to {start + num_tokens}, {len(slot.token_ids)} are known")
        return torch.from_numpy(part.astype(np.int64)).to(self._device, non_blocking=True)

    def _positions(self, positions: Sequence[int]) -> torch.Tensor:
        return torch.tensor(positions, dtype=torch.float32).to(self._device, non_blocking=True)

    def _prefill(self, runs: Sequence[Run]) -> list[_PromptPart]:
        """All PREFILL runs in one pass: products take their rows together, attention each sequence's alone."""
        slots = [self._slot(run.slot) for run in runs]
        plans = [
            self._attention.chunk(slot.pages, run.start, run.num_tokens) for slot, run in zip(slots, runs, strict=True)
        ]
        sizes = [run.num_tokens for run in runs]
        plan = plans[0] if len(plans) == 1 else ChunkGroup(plans, sizes)
        token_ids = torch.cat(
            [self._known(slot, run.start, run.num_tokens) for slot, run in zip(slots, runs, strict=True)]
        )
        positions = self._positions([at for run in runs for at in range(run.start, run.start + run.num_tokens)])
        taps = self._new_taps()
        wants_rows = any(slot.sampling.params.prompt_logprobs is not None for slot in slots)
        hidden = None
        if wants_rows:
            hidden = self.model.hidden(token_ids, positions, plan, taps)
        else:
            self.model.prefill(token_ids, positions, plan, taps)
        if taps is not None and self.drafter is not None:
            for run, own in zip(runs, torch.split(taps.side_by_side(), sizes), strict=True):
                self.drafter.observe(run.slot, run.start, own)
        if hidden is None:
            return []
        rows = torch.split(hidden, sizes)
        return [
            part
            for run, slot, own in zip(runs, slots, rows, strict=True)
            for part in self._prompt_logprobs(run, slot, own)
        ]

    def _prompt_logprobs(self, run: Run, slot: _Slot, rows: torch.Tensor) -> list[_PromptPart]:
        """For the prompt tokens that follow the run's positions, where the request asked for them."""
        num_top = slot.sampling.params.prompt_logprobs
        count = min(run.num_tokens, slot.sampling.num_prompt_tokens - 1 - run.start)
        if num_top is None or count <= 0:
            return []
        following = self._known(slot, run.start + 1, count)
        parts: list[_PromptPart] = []
        for at in range(0, count, _LOGITS_ROWS):
            block = slice(at, min(at + _LOGITS_ROWS, count))
            logits = clean_(self.model.gather_logits(self.model.local_logits(rows[block])))
            parts.append(_PromptPart(run.slot, num_top, raw_logprobs(logits, following[block])))
        return parts

    def _drafted(self, runs: Sequence[Run]) -> list[SampledRows]:
        """The runs with what the drafter proposes for them."""
        asked = [run for run in runs if run.kind is RunKind.VERIFY]
        if not asked or self.drafter is None:
            return [SampledRows(run) for run in runs]
        proposed = self.drafter.propose([run.slot for run in asked], [run.num_tokens - 1 for run in asked])
        drafts = {run.slot: tuple(tokens) for run, tokens in zip(asked, proposed, strict=True)}
        return [SampledRows(run, drafts.get(run.slot, ())) for run in runs]

    def _new_taps(self) -> Taps | None:
        return Taps(self.drafter.taps) if self.drafter is not None and self.drafter.taps else None

    def _observe_sampled(self, sampled: Sequence[SampledRows], kept: Sequence[range], taps: Sequence[Taps]) -> None:
        """Show the drafter the rows whose tokens are known: those of drafts that were refused never are."""
        if self.drafter is None or not taps:
            return
        rows = torch.cat([each.side_by_side() for each in taps])
        for each, own in zip(sampled, kept, strict=True):
            self.drafter.observe(each.run.slot, each.run.start, rows[own.start : own.stop])

    def _grouped(self, first: Sequence[SampledRows], decode: Sequence[SampledRows]) -> list[Sequence[SampledRows]]:
        """Which sampling runs are computed together: as the plan says, or more where that changes no bit."""
        num_rows = sum(len(each.positions) for each in (*first, *decode))
        if self.model.is_row_invariant and num_rows <= MAX_ROWS:
            groups: list[Sequence[SampledRows]] = [[*first, *decode]]
        elif self.model.is_row_invariant:
            groups = [first[at : at + MAX_ROWS] for at in range(0, len(first), MAX_ROWS)] + [decode]
        else:
            groups = [[run] for run in first] + [decode]
        return [group for group in groups if group]

    def _sampling_rows(self, group: Sequence[SampledRows], taps: list[Taps]) -> torch.Tensor:
        """Rows [rows of the group, hidden] of one token each: the slot's last token, known or sampled, and drafts."""
        batch: list[BatchRow] = []
        for each in group:
            slot = self._slot(each.run.slot)
            if each.run.kind is RunKind.FIRST:
                self._last_tokens[each.run.slot] = int(slot.token_ids[each.run.start])
            batch.extend(BatchRow(slot.pages, position) for position in each.positions)
        slots = torch.tensor([each.run.slot for each in group for _ in each.positions])
        token_ids = self._last_tokens[slots.to(self._device, non_blocking=True)]
        if any(each.drafts for each in group):
            known = torch.tensor([token for each in group for token in (-1, *each.drafts)]).to(self._device)
            token_ids = torch.where(known < 0, token_ids, known)
        own = self._new_taps()
        taps.extend([] if own is None else [own])
        positions = self._positions([row.position for row in batch])
        return self.model.hidden(token_ids, positions, self._attention.batch(batch), own)

    def _choose_rows(
        self, sampled: Sequence[SampledRows], hidden: Sequence[torch.Tensor]
    ) -> tuple[Chosen, RawLogprobs | None]:
        """The token behind each row; ``hidden`` holds the rows, in groups."""
        parts = [self.model.local_logits(rows) for rows in hidden]
        local = parts[0] if len(parts) == 1 else torch.cat(parts)
        states = [self._slot(each.run.slot).sampling for each in sampled]
        gathered = raw_logits = None
        if any(state.params.logprobs is not None for state in states):
            gathered = self.model.gather_logits(local)
            raw_logits = clean_(gathered.clone())
        chosen = self._choose(local, sampled, states, gathered)
        return chosen, None if raw_logits is None else raw_logprobs(raw_logits, chosen.tokens)

    def _remember(self, sampled: Sequence[SampledRows], tokens: torch.Tensor, kept: Sequence[range]) -> None:
        """The tokens of the rows ``kept`` are decided."""
        slots = torch.tensor([each.run.slot for each in sampled], device=self._device)
        ends = [rows[-1] for rows in kept]
        last = tokens if len(ends) == len(tokens) else tokens[torch.tensor(ends, device=self._device)]
        self._last_tokens[slots] = last
        for each, rows in zip(sampled, kept, strict=True):
            own = tokens[rows.start : rows.stop]
            counts = self._slot(each.run.slot).sampling.output_counts
            if counts is not None:
                counts.index_add_(0, own, counts.new_ones(len(own)))
            if self.drafter is not None:
                self.drafter.extend(each.run.slot, own.tolist())
