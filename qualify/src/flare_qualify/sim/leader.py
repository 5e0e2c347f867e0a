"""Rank zero of a simulated run: the real dispatcher, prefix store, scheduler and engine around one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from flare_cache.dispatcher import Dispatcher
from flare_cache.jobs import Job
from flare_cache.join import Finished
from flare_cache.join_report import JoinReport
from flare_cache.outcomes import Outcome, ShardedLimits
from flare_cache.record_group import LeaderGroup, new_store
from flare_cache.record_plan import FileSizes
from flare_cache.sharded import ShardedLeader
from flare_cache.staged import StagedTransport
from flare_cache.tier_store import TierStore
from flare_cli.control_group import PLAN
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine
from flare_core.engine.request import Command, EngineEvent
from flare_core.engine.scheduler import Scheduler
from flare_core.errors import Poisoned
from flare_core.plan import StepPlan, StepResult, encode_plan
from flare_core.prefix import PrefixQuery, Restorable, StoreEvent, StoreRequest, Tier
from flare_qualify.sim.joining import Joining
from flare_qualify.sim.links import SimLink
from flare_qualify.sim.loop import Violation
from flare_qualify.sim.pool_ranks import PoolLead
from flare_qualify.sim.process import RankProcess
from flare_transport.errors import TransportError
from flare_transport.router import Router

__all__ = ["Leader", "LeaderWatch"]

_POLL_SECONDS = 0.25
_TURN_SECONDS = 0.00005
_DRAIN_SECONDS = 0.05
_EXIT_SECONDS = 1.0


class LeaderWatch(Protocol):
    """Who looks at what rank zero's machines say to each other."""

    def joined(self, leader: Leader) -> None: ...

    def submitted(self, leader: Leader, job: Job) -> None: ...

    def took(self, leader: Leader, outcomes: Sequence[Outcome]) -> None: ...

    def looked_up(self, leader: Leader, query: PrefixQuery, found: Restorable) -> None: ...

    def fetching(self, leader: Leader, ticket: int, pages: Sequence[int], row_slot: int | None) -> None: ...

    def storing(self, leader: Leader, ticket: int | None, request: StoreRequest) -> None: ...

    def polled(self, leader: Leader, events: Sequence[StoreEvent]) -> None: ...

    def planned(self, leader: Leader, plan: StepPlan) -> None: ...

    def emitted(self, leader: Leader, events: Sequence[EngineEvent]) -> None: ...

    def poisoned(self, leader: Leader, reason: str) -> None: ...

    def draw_id(self) -> bytes: ...


@dataclass(slots=True)
class _Pending:
    value: StepResult | None = None

    def result(self) -> StepResult:
        if self.value is None:
            raise Violation("engine", "a result was taken before its step had ended")
        return self.value


@dataclass(frozen=True, slots=True)
class _Queue:
    """The dispatcher, as the prefix store sees it."""

    leader: Leader

    def submit(self, job: Job, *, tag: int, num_bytes: int, expires_at: float | None = None) -> None:
        self.leader.watch.submitted(self.leader, job)
        self.leader.dispatcher.submit(job, tag=tag, num_bytes=num_bytes, expires_at=expires_at)

    def cancel(self, tag: int) -> None:
        self.leader.dispatcher.cancel(tag)

    def take(self) -> Sequence[Outcome]:
        outcomes = self.leader.dispatcher.take()
        if outcomes:
            self.leader.watch.took(self.leader, outcomes)
        return outcomes


@dataclass(frozen=True, slots=True)
class _Store:
    """The prefix store, as the scheduler sees it."""

    leader: Leader
    inner: TierStore

    def prepare(self, query: PrefixQuery) -> int | None:
        return self.inner.prepare(query)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self.inner.prefilled(num_tokens, seconds)

    def lookup(self, query: PrefixQuery) -> Restorable:
        found = self.inner.lookup(query)
        self.leader.watch.looked_up(self.leader, query, found)
        return found

    def fetch(
        self, query: PrefixQuery, restorable: Restorable, *, pages: Sequence[int], row_slot: int | None, after_step: int
    ) -> int:
        ticket = self.inner.fetch(query, restorable, pages=pages, row_slot=row_slot, after_step=after_step)
        self.leader.watch.fetching(self.leader, ticket, pages, row_slot)
        return ticket

    def store(self, request: StoreRequest) -> int | None:
        self.leader.watch.storing(self.leader, None, request)
        ticket = self.inner.store(request)
        if ticket is not None:
            self.leader.watch.storing(self.leader, ticket, request)
        return ticket

    def poll(self) -> Sequence[StoreEvent]:
        events = self.inner.poll()
        if events:
            self.leader.watch.polled(self.leader, events)
        return events

    def cancel(self, ticket: int) -> None:
        self.inner.cancel(ticket)

    def reset(self, tier: Tier) -> bool:
        return self.inner.reset(tier)


class Leader:
    """See the module."""

    def __init__(self, process: RankProcess, watch: LeaderWatch) -> None:
        self.process = process
        self.watch = watch
        self.poison: str | None = None
        self.poison_seen = False
        self.is_asked_to_drain = False
        self.is_draining = False
        self.store: TierStore | None = None
        self.engine: Engine | None = None
        self.scheduler: Scheduler | None = None
        context = process.context
        options = context.options
        self.pool: PoolLead | None = None
        if context.pool is not None:
            self.pool = PoolLead(process, lambda rank, payload: self.dispatcher.tell(rank, payload))  # noqa: PLW0108 - later
        self.machine = ShardedLeader(
            run_id=context.run_id,
            world_size=options.world_size,
            limits=ShardedLimits(max_outstanding=options.max_outstanding),
        )
        self.dispatcher = Dispatcher(
            self.machine,
            on_outcome=self.wake,
            on_poison=self._become_poisoned,
            clock=context.loop.clock,
            on_pool=None if self.pool is None else self.pool.agent.receive,
        )
        self._controls: dict[int, SimLink] = {}
        self._records: dict[int, SimLink] = {}
        self._steps: deque[_Pending] = deque()
        self._group: LeaderGroup | None = None
        self._turn = 0
        self._is_waiting = False
        process.on_step = self._step_over

    def begin(self, controls: Mapping[int, SimLink], records: Mapping[int, SimLink]) -> None:
        """Start links and join."""
        process = self.process
        self._controls, self._records = dict(controls), dict(records)
        joining = Joining(
            process.setup(),
            records,
            now=process.context.loop.now,
            on_joined=self._joined,
            on_failed=lambda reason: process.exit_within(_EXIT_SECONDS, f"join failed: {reason}"),
        )
        for rank, link in records.items():
            router = Router()
            self.dispatcher.route(router, rank)
            joining.route(router, rank)
            link.start(router, pulse=self.dispatcher.pulse)
        for link in controls.values():
            router = Router()
            router.on_end(lambda _, end: process.exit_within(_EXIT_SECONDS, end.detail))
            link.start(router, pulse=bytes)
        process.setup().make_transport(self.dispatcher.finished_here, self.dispatcher.fault_here)
        joining.begin_as_leader(draw_set_id=self.watch.draw_id)

    def _joined(self, finished: Finished) -> None:
        process = self.process
        context, options = process.context, process.context.options
        setup = process.setup()
        store = new_store(
            setup,
            FileSizes(context.settings.identity.geometries),
            joined=finished,
            jobs=_Queue(self),
            clock=context.loop.clock,
            draw_store_id=self.watch.draw_id,
        )
        self.store = store
        self.dispatcher.serve(process, self._records)
        page_tokens = options.page_tokens
        config = SchedulerConfig(
            page_tokens=page_tokens,
            num_pages=options.num_pages,
            max_sequences=options.max_sequences,
            max_model_len=1 << 20,
            vocab_size=context.model.vocab_size,
            set_fingerprint=context.settings.identity.fingerprint(),
            has_rows=options.has_rows,
            num_row_snapshots=options.num_row_snapshots if options.has_rows else 0,
            row_interval_tokens=store.record_tokens if options.has_rows else 0,
            max_prefill_tokens=options.max_prefill_tokens,
            max_mixed_tokens=max(page_tokens, options.max_prefill_tokens // 2),
            min_tail_tokens=options.min_tail_tokens,
        )
        watched = _Store(self, store)
        self.scheduler = Scheduler(config, watched)
        self.engine = Engine(
            self.scheduler,
            self,
            gate=self,
            store=watched,
            send_plan=self._send_plan,
            emit=lambda events: self.watch.emitted(self, events),
            lead=options.lead,
            clock=context.loop.clock,
        )
        if process.transport is not None:
            # A group's transport is asked for by its own type only to be closed.
            transport = cast("StagedTransport", process)
            agent = None if self.pool is None else self.pool.agent
            self._group = LeaderGroup(store, self.dispatcher, transport, finished.report, setup, agent)
        process.is_joined = True
        self.watch.joined(self)
        self._tick()
        if self.pool is not None and process.pool_shelf is not None:
            pending_bytes = options.pool_records * context.settings.max_record_bytes
            self.pool.start(store, process.pool_shelf, pending_bytes=pending_bytes, wake=self.wake)
        self._schedule(_TURN_SECONDS)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def put(self, commands: list[Command]) -> None:
        """Send commands to the engine."""
        if self.engine is not None:
            self.engine.inbox.put(commands)
            self.wake()

    def drain(self, commands: list[Command]) -> None:
        """Ask the engine to end in order."""
        self.is_asked_to_drain = True
        self.put(commands)

    @property
    def report(self) -> JoinReport | None:
        """Of the join, once it has ended."""
        return self._group.report if self._group is not None else None

    @property
    def pool_session(self) -> bytes | None:
        """The session that all ranks are in."""
        return None if self.pool is None else self.pool.machine.session

    @property
    def has_steps(self) -> bool:
        """Steps that the engine has launched and not finished."""
        return bool(self._steps) or (self.engine is not None and self.engine.due is not None)

    def wake(self) -> None:
        """Something has come for the engine."""
        if self._is_waiting and self.engine is not None:
            self._is_waiting = False
            self._schedule(_TURN_SECONDS)

    def _schedule(self, seconds: float) -> None:
        self._turn += 1
        number = self._turn
        self.process.after(seconds, "engine", lambda: self._take_turn(number))

    def _take_turn(self, number: int) -> None:
        engine = self.engine
        if number != self._turn or engine is None or self.poison_seen:
            return
        self._is_waiting = False
        was_poisoned = self.poison is not None and engine.due is None
        try:
            progressed = engine.begin() if engine.due is None else True
        except Poisoned as error:
            self.poison_seen = True
            self.process.context.loop.note(f"engine stops: {error}")
            self.process.exit_within(_EXIT_SECONDS, f"poisoned: {error}")
            return
        if was_poisoned:
            raise Violation("after poison", f"the engine goes on after: {self.poison}")
        due = cast("_Pending | None", engine.due)
        if due is not None:
            if due.value is None:
                return
            engine.finish()
            progressed = True
        if engine.is_finished:
            self._end_in_order()
        elif progressed:
            self._schedule(_TURN_SECONDS)
        else:
            self._is_waiting = True
            self._schedule(_POLL_SECONDS)

    def launch(self, plan: StepPlan) -> _Pending:
        """The engine's runner: the device executes ``plan``."""
        pending = _Pending()
        self._steps.append(pending)
        self.process.device.submit(plan)
        return pending

    def wait_for_jobs(self, jobs: Sequence[int]) -> None:
        """The engine's gate: the device waits, not the engine's thread."""

    def step_finished(self, step: int) -> None:
        """The engine's gate."""
        self.dispatcher.step_finished(step)

    def _send_plan(self, plan: StepPlan) -> None:
        self.watch.planned(self, plan)
        data = encode_plan(plan)
        for link in self._controls.values():
            try:
                link.send(PLAN, data)
            except TransportError:
                continue  # its end ends the process

    def _step_over(self, result: StepResult) -> None:
        self._steps.popleft().value = result
        engine = self.engine
        if engine is not None and engine.due is not None:
            self._schedule(_TURN_SECONDS)

    # -- time, poison, end -----------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self.is_draining:
            self.dispatcher.tick()
            self.process.after(_POLL_SECONDS, "dispatcher ticks", self._tick)

    def _become_poisoned(self, reason: str) -> None:
        self.poison = reason
        self.watch.poisoned(self, reason)
        self.process.exit_within(_EXIT_SECONDS, f"poisoned: {reason}")

    def _end_in_order(self) -> None:
        """The engine has drained: wait for removals under way, then close the group and leave ``join.idx``."""
        store, group = self.store, self._group
        if store is None or group is None or self.poison is not None:
            return
        try:
            store.poll()
        except Poisoned:
            return
        if not store.is_idle:
            self.process.after(_DRAIN_SECONDS, "leader drains", self._end_in_order)
            return
        self.is_draining = True
        try:
            is_drained = group.close(0.0)
        except OSError:
            is_drained = True
        if is_drained:
            self.process.exit_within(_EXIT_SECONDS, "ended in order")
        else:
            self.process.after(_DRAIN_SECONDS, "leader closes", self._end_in_order)
