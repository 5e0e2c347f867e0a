"""The scheduler: requests, step results and store events go in, step plans and engine events come out.

Pure but for the ``PrefixStore`` port, whose calls do not block. Continuous batching: every step has all sequences
that decode, and prefill chunks within a token budget beside them. Pages that a planned step computes belong to the
device index from the next plan on, because steps run in order.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from flare_core.engine.admission import Admission, Verdict, make_sequence
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.device_cache import DeviceCache
from flare_core.engine.plan_builder import PlanBuilder, PlannedStep
from flare_core.engine.prefill import PrefillPlanner
from flare_core.engine.request import (
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    FinishReason,
    Phase,
    Progress,
    PromptLogprobs,
    Tokens,
    Usage,
)
from flare_core.engine.sequence import Sequence, SequenceState
from flare_core.engine.speculation import DraftPlanner
from flare_core.engine.statistics import EngineSnapshot, Statistics
from flare_core.engine.step_results import sequence_results
from flare_core.engine.transfers import Transfers
from flare_core.errors import RequestError
from flare_core.plan import RunKind, SampledToken, StepPlan, StepResult
from flare_core.ports import PrefixStore
from flare_core.prefix import FetchFinished, LookupReady, StoreEvent, StoreFinished, Tier

__all__ = ["Scheduler"]


class Scheduler:
    """Called by one thread. Events gather until :meth:`take_events`."""

    def __init__(self, config: SchedulerConfig, store: PrefixStore | None = None) -> None:
        self.config = config
        self.statistics = Statistics()
        self.cache = DeviceCache(
            page_tokens=config.page_tokens,
            num_pages=config.num_pages,
            max_sequences=config.max_sequences,
            num_row_snapshots=config.num_row_snapshots if config.has_rows else 0,
            has_rows=config.has_rows,
        )
        self._transfers = Transfers(
            self.cache, store, min_tail_tokens=config.min_tail_tokens, statistics=self.statistics
        )
        self._admission = Admission(self.cache, self._transfers)
        self._prefill = PrefillPlanner(config, self.cache)
        self._drafting = None if config.speculation is None else DraftPlanner(config.speculation)
        self._events: list[EngineEvent] = []
        self._by_id: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._active: list[Sequence] = []
        self._points: list[tuple[Sequence, bool]] = []
        self._in_flight: deque[PlannedStep] = deque()
        self._jobs: list[int] = []
        self._last_builder: PlanBuilder | None = None
        self._last_step = 0
        self._num_added = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._by_id)

    @property
    def num_transfers(self) -> int:
        """Fetches and stores under way."""
        return self._transfers.num_storing + len(self._transfers.fetching)

    def take_events(self) -> list[EngineEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def add(self, request: EngineRequest) -> None:
        """Queue a request, or refuse it with a :class:`Failed` event."""
        if request.request_id in self._by_id:
            msg = f"request id {request.request_id!r} is in use; ids are unique among unfinished requests"
            raise ValueError(msg)
        try:
            sequence = make_sequence(request, order=self._num_added, config=self.config)
        except RequestError as error:
            self._fail(request.request_id, error)
            return
        self._num_added += 1
        self._by_id[request.request_id] = sequence
        self._waiting.append(sequence)
        self._admission.prepare(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown ids are ignored."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.CANCELLED)

    def reset_device_cache(self) -> None:
        """Forget all pages and rows that the device index knows; what sequences use stays theirs."""
        self.cache.index.clear()

    # -- results and store events --------------------------------------------------------------------------------

    def finish_step(self, result: StepResult, now: float, *, seconds: float | None = None) -> None:
        """The oldest unfinished step has finished with ``result``; it took ``seconds``, if that is known."""
        planned = self._in_flight.popleft()
        if planned.step != result.step:
            raise AssertionError(f"step {result.step} finished, step {planned.step} was due")
        self.statistics.num_steps += 1
        for sequence in planned.members:
            sequence.num_in_flight -= 1
        for slot, entries in result.prompt_logprobs:
            sequence, start = planned.prompt_runs[slot]
            fresh = entries[max(0, sequence.num_prompt_logprobs - start) :]
            if fresh and sequence.request_id in self._by_id:
                sequence.num_prompt_logprobs += len(fresh)
                self._events.append(PromptLogprobs(sequence.request_id, fresh))
        if self._drafting is not None and seconds is not None and planned.only_decodes:
            self._drafting.costs.measured(len(planned.sampled) + sum(result.num_drafts), seconds)
        for each in sequence_results(planned, result):
            each.sequence.num_pending -= 1
            if each.num_drafts is not None:
                each.sequence.verified(each.num_drafts, len(each.decided) - 1, num_tokens=len(each.tokens))
                self.statistics.draft_tokens += each.num_drafts
                self.statistics.accepted_tokens += len(each.decided) - 1
            self._take_tokens(each.sequence, each.tokens, now)

    def _take_tokens(self, sequence: Sequence, tokens: tuple[SampledToken, ...], now: float) -> None:
        """The tokens of one step; only the last one may be a stop token, or the last that is wanted."""
        if sequence.state is SequenceState.ENDED:
            return
        for token in tokens:
            sequence.tokens.append(token.token_id)
        if sequence.state is SequenceState.ENDING:
            return
        self.statistics.count_outputs(sequence, len(tokens), now)
        logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
        ids = tuple(token.token_id for token in tokens)
        self._events.append(Tokens(sequence.request_id, ids, logprobs or None))
        if ids[-1] in sequence.stop_ids:
            self._end(sequence, FinishReason.STOP)
        elif sequence.num_outputs >= sequence.max_tokens:
            self._end(sequence, FinishReason.LENGTH)
        elif sequence.state is SequenceState.RUNNING:
            num_known = min(sequence.num_computed, len(sequence.tokens))
            self.cache.register(sequence, num_known, with_tail=False)

    def store_event(self, event: StoreEvent, now: float) -> None:
        """A lookup, a fetch or a store has ended."""
        match event:
            case LookupReady():
                self._transfers.lookup_ready(event)
            case StoreFinished():
                self._transfers.finish_store(event)
            case FetchFinished():
                sequence = self._transfers.fetching.pop(event.ticket)
                sequence.ticket = None
                self.statistics.restore.add(now - sequence.fetch_start)
                self._jobs.extend(event.jobs)
                if sequence.state is SequenceState.FETCHING:
                    sequence.state = SequenceState.RUNNING
                    self._restored(sequence, event)

    def _restored(self, sequence: Sequence, event: FetchFinished) -> None:
        by_tier: dict[Tier, int] = {}
        if event.num_tokens > sequence.num_computed and (event.row_restored or not self.cache.has_rows):
            by_tier = dict(event.tokens_by_tier)
            self._drop_sources(sequence)
            sequence.num_computed = event.num_tokens
            self.cache.register(sequence, event.num_tokens, with_tail=True)
            self.cache.mark_handed(sequence, event.num_tokens)
            if self.cache.has_rows:
                self._points.append((sequence, True))
        by_tier[Tier.DEVICE] = sequence.num_computed - sum(by_tier.values())
        if sequence.num_admissions == 1:
            self._count_hits(sequence, by_tier)

    def _count_hits(self, sequence: Sequence, by_tier: dict[Tier, int]) -> None:
        for tier, num_tokens in by_tier.items():
            if num_tokens > 0:
                self.statistics.hit_tokens[tier] += num_tokens
                sequence.cached_tokens[tier] = sequence.cached_tokens.get(tier, 0) + num_tokens

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to execute until an event comes."""
        if self._last_builder is not None:
            self._last_builder.release_late()
            self._last_builder = None
        builder = PlanBuilder(self._last_step + 1, self.cache)
        self._settle(builder)
        self._plan_decodes(builder)
        self._admit(builder, now)
        self._plan_prefills(builder)
        if builder.is_empty:
            return None
        plan, planned = builder.build(self._jobs)
        self._jobs.clear()
        self._in_flight.append(planned)
        self._last_builder = builder
        self._last_step = plan.step
        return plan

    def _settle(self, builder: PlanBuilder) -> None:
        """Learn the pages that earlier plans compute, hand prefixes to the store, let go of what has ended."""
        points, self._points = self._points, []
        for sequence, is_kept in points:
            if sequence.state is SequenceState.RUNNING:
                self.cache.register(sequence, sequence.num_computed, with_tail=is_kept)
                if is_kept:
                    self._transfers.hand_over(sequence, sequence.num_computed, builder)
        for sequence in [sequence for sequence in self._active if sequence.state is SequenceState.ENDING]:
            if not sequence.num_in_flight and sequence.ticket is None:
                if not sequence.start_needed:
                    num_tokens = min(sequence.num_computed, len(sequence.tokens))
                    self.cache.register(sequence, num_tokens, with_tail=True)
                    self._transfers.hand_over(sequence, num_tokens, builder)
                self._release(sequence, builder, SequenceState.ENDED)

    def _plan_decodes(self, builder: PlanBuilder) -> None:
        ready = [each for each in self._active if each.state is SequenceState.RUNNING and each.may_decode]
        allowed = [(each.acceptance, each.max_drafts) for each in ready]
        lengths = [0] * len(ready) if self._drafting is None else self._drafting.lengths(allowed)
        for sequence, length in zip(ready, lengths, strict=True):
            if sequence.state is not SequenceState.RUNNING:
                continue  # it was preempted for another one's page
            if sequence.num_computed < len(sequence.pages) * sequence.page_tokens or self._grow(sequence, builder):
                num_drafts = min(length, self.cache.make_room(sequence, 1 + length) - 1)
                builder.add_run(sequence, RunKind.VERIFY if num_drafts else RunKind.DECODE, 1 + num_drafts)

    def _grow(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """One page more, at the cost of the sequences admitted last; False when it must wait or was preempted."""
        while True:
            pages = self.cache.allocate(1)
            if pages is not None:
                sequence.pages.extend(pages)
                return True
            if self.cache.pool.num_pinned_only or any(
                other.state is SequenceState.ENDING or other.give_up for other in self._active
            ):
                return False
            self._preempt(self._active[-1], builder)
            if sequence.state is SequenceState.WAITING:
                return False

    def _preempt(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Take its pages; it will be computed again from all tokens known by then."""
        if sequence.state is SequenceState.FETCHING:
            sequence.give_up = True
            self._transfers.cancel_fetch(sequence)
            return
        self.statistics.num_preemptions += 1
        if not sequence.start_needed:
            num_tokens = min(sequence.num_computed, len(sequence.tokens))
            self.cache.register(sequence, num_tokens, with_tail=True)
        self._release(sequence, builder, SequenceState.WAITING)
        insort(self._waiting, sequence, key=lambda waiting: waiting.order)

    def _admit(self, builder: PlanBuilder, now: float) -> None:
        for sequence in [sequence for sequence in self._active if sequence.give_up and sequence.ticket is None]:
            self._preempt(sequence, builder)
        # A request whose lookup is under way holds nobody up.
        for sequence in [each for each in self._waiting if each.lookup is None]:
            match self._admission.try_admit(sequence, builder, num_active=len(self._active), now=now):
                case Verdict.BLOCKED:
                    return
                case Verdict.HOPELESS:
                    self._waiting.remove(sequence)
                    msg = f"{len(sequence.tokens)} tokens do not fit into the device pages that are left"
                    self._forget(sequence, RequestError(msg, status=503))
                case Verdict.ADMITTED:
                    self._waiting.remove(sequence)
                    insort(self._active, sequence, key=lambda active: active.order)
                    self._count_admission(sequence, now)

    def _count_admission(self, sequence: Sequence, now: float) -> None:
        if sequence.state is SequenceState.FETCHING:
            self._events.append(self._progress(sequence, Phase.RESTORE))
        if sequence.num_admissions > 1:
            return
        self.statistics.queue.add(now - sequence.request.arrival)
        self.statistics.prompt_tokens += sequence.num_prompt_tokens
        if sequence.reads_cache:
            self.statistics.num_lookups += 1
            self.statistics.lookup_tokens += sequence.num_prompt_tokens - 1
        if sequence.state is SequenceState.RUNNING:
            self._count_hits(sequence, {Tier.DEVICE: sequence.num_computed})

    def _plan_prefills(self, builder: PlanBuilder) -> None:
        ready = [s for s in self._active if s.state is SequenceState.RUNNING and s.num_computed <= s.prefill_end]
        for sequence, num_adopted in self._prefill.plan(ready, builder):
            if num_adopted and sequence.num_admissions == 1:
                self._count_hits(sequence, {Tier.DEVICE: num_adopted})
            if sequence.num_computed <= sequence.prefill_end:
                at_end = sequence.num_computed == sequence.prefill_end
                self._points.append((sequence, at_end or self._prefill.is_row_point(sequence.num_computed)))
                self._events.append(self._progress(sequence, Phase.PREFILL))

    def _progress(self, sequence: Sequence, phase: Phase) -> Progress:
        return Progress(sequence.request_id, phase, sequence.num_computed, sequence.num_prompt_tokens)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        usage = Usage(
            prompt_tokens=sequence.num_prompt_tokens,
            completion_tokens=sequence.num_outputs,
            cached_tokens=dict(sequence.cached_tokens),
            draft_tokens=sequence.num_drafted,
            accepted_tokens=sequence.num_accepted,
        )
        self._events.append(Finished(sequence.request_id, reason, usage))
        self.statistics.count_finish(reason)
        self._retire(sequence)

    def _forget(self, sequence: Sequence, error: RequestError) -> None:
        self._fail(sequence.request_id, error)
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """No more steps for it; what it holds is let go of when its steps and its fetch are over."""
        del self._by_id[sequence.request_id]
        if sequence.state is SequenceState.WAITING:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            sequence.state = SequenceState.ENDED
            return
        if sequence.state is SequenceState.FETCHING:
            self._transfers.cancel_fetch(sequence)
        sequence.state = SequenceState.ENDING

    def _fail(self, request_id: str, error: RequestError) -> None:
        self.statistics.count_finish(FinishReason.ERROR)
        self._events.append(Failed(request_id, str(error), error.status, error.param, error.code))

    def fail_all(self, error: RequestError) -> None:
        """End every request with ``error``."""
        for sequence in list(self._by_id.values()):
            self._forget(sequence, error)

    def quarantine_transfers(self) -> None:
        """The ranks lost account of each other: pages and slots of unfinished transfers are never used again."""
        self._transfers.quarantine()

    def _release(self, sequence: Sequence, builder: PlanBuilder, state: SequenceState) -> None:
        self._drop_sources(sequence)
        self.cache.release(reversed(sequence.pages))
        builder.free_slot(sequence.slot)
        sequence.pages = []
        sequence.slot = -1
        sequence.give_up = False
        sequence.state = state
        self._active.remove(sequence)

    def _drop_sources(self, sequence: Sequence) -> None:
        if sequence.copy_source >= 0:
            self.cache.release((sequence.copy_source,))
            sequence.copy_source = -1
        if sequence.row_source is not None and sequence.row_source >= 0:
            self.cache.rows.drop(sequence.row_source)
        sequence.row_source = None

    # -- views ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        """Counters and states now."""
        states = [sequence.state for sequence in self._active]
        return self.statistics.snapshot(
            running=states.count(SequenceState.RUNNING),
            waiting=len(self._waiting),
            fetching=states.count(SequenceState.FETCHING),
            pool=self.cache.pool,
        )

    def check(self) -> None:
        """Every page and slot is accounted for; ``AssertionError`` otherwise. O(pages)."""
        self.cache.pool.check()
        slots = {sequence.slot for sequence in self._active}
        if self._last_builder is not None:
            slots |= self._last_builder.late_slots
        self.cache.rows.check(slots)

    def check_at_rest(self) -> None:
        """With no request left and no transfer under way, nobody holds anything."""
        self.check()
        held = (self.cache.pool.num_held, self.cache.rows.num_held_snapshots, len(self._active), len(self._in_flight))
        if any(held):
            raise AssertionError(f"at rest, but pages, snapshots, sequences, steps held are {held}")
