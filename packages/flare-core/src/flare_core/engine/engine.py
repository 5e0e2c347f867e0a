"""The loops that drive a model runner by step plans: rank zero's :class:`Engine` and a peer's :class:`PeerLoop`.

A thin shell: it owns the order of calls, the inbox and the clock; decisions are the scheduler's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flare_core.engine.inbox import Inbox
from flare_core.engine.request import (
    AddRequest,
    CacheReset,
    CancelRequest,
    Command,
    Drain,
    EngineEvent,
    Failed,
    ResetCache,
    Stop,
)
from flare_core.engine.scheduler import Scheduler
from flare_core.errors import Poisoned, RequestError
from flare_core.plan import RunKind, StepPlan, decode_plan
from flare_core.ports import JobGate, ModelRunner, PendingStep, PrefixStore
from flare_core.prefix import Tier

__all__ = ["Engine", "NoGate", "PeerLoop"]

_STORE_POLL_SECONDS = 0.25
"""How often an idle engine asks its store all the same: so that a poisoning is seen even when nothing wakes it."""


class NoGate:
    """The gate of an engine without transfers."""

    def wait_for_jobs(self, jobs: Sequence[int]) -> None:
        """There are none."""

    def step_finished(self, step: int) -> None:
        """Nobody waits for it."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that was launched and whose result was not taken."""

    plan: StepPlan
    began_at: float
    pending: PendingStep


class Engine:
    """Rank zero's engine thread.

    ``emit`` receives the events of each iteration, in order, on the engine thread, and must not block for long.
    ``send_plan`` hands a plan to the peers before this rank launches it. ``lead`` 0: a step is planned when the one
    before it has finished; 1: one step ahead.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        gate: JobGate,
        store: PrefixStore | None,
        send_plan: Callable[[StepPlan], None],
        emit: Callable[[list[EngineEvent]], None],
        lead: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.inbox = Inbox()
        self._runner = runner
        self._gate = gate
        self._store = store
        self._send_plan = send_plan
        self._emit = emit
        self._lead = lead
        self._clock = clock
        self._in_flight: deque[_Launched] = deque()
        self._last_finish = 0.0
        self._is_due = False
        self._is_draining = False
        self._is_stopped = False

    @property
    def is_finished(self) -> bool:
        """A :class:`Stop` was obeyed, or a :class:`Drain` to its end."""
        if self._is_stopped:
            return True
        busy = self.scheduler.num_unfinished or self.scheduler.num_transfers or self._in_flight
        return self._is_draining and not busy

    def run(self) -> None:
        """Serve until told to stop; blocks without spinning while there is nothing to do.

        Raises:
            Poisoned: all requests were failed with 503 before; the process must end.
        """
        while True:
            progressed = self.step()
            if self.is_finished:
                return
            if not progressed:
                self.inbox.wait(None if self._store is None else _STORE_POLL_SECONDS)

    def step(self) -> bool:
        """One iteration: commands, store events, at most one plan, at most one result. False: nothing to do for now.

        Blocks while the runner computes.
        """
        progressed = self.begin()
        if self.due is None:
            return progressed
        self.finish()
        return True

    def begin(self) -> bool:
        """First half of an iteration: commands, store events, at most one plan; blocks in gate and launch only.

        False: nothing was done. Either way :attr:`due` says whether :meth:`finish` must follow.
        """
        began = time.perf_counter()
        elsewhere = 0.0
        progressed = self._take_commands(self.inbox.drain())
        progressed = self._poll_store() or progressed
        plan = None
        if len(self._in_flight) <= self._lead and not self._is_stopped:
            plan = self.scheduler.plan(self._clock())
        if plan is not None:
            self._send_plan(plan)
            launched = time.perf_counter()
            self._gate.wait_for_jobs(plan.needs_jobs)
            began_at = self._clock()
            self._in_flight.append(_Launched(plan, began_at, self._runner.launch(plan)))
            elsewhere = time.perf_counter() - launched
        self._is_due = bool(self._in_flight) and (plan is None or len(self._in_flight) > self._lead)
        if not self._is_due:
            self._flush()
        if plan is not None:
            self.scheduler.statistics.own_seconds += time.perf_counter() - began - elsewhere
        return progressed or plan is not None

    @property
    def due(self) -> PendingStep | None:
        """The step whose result the iteration that :meth:`begin` began still has to take."""
        return self._in_flight[0].pending if self._is_due else None

    def finish(self) -> None:
        """Second half of an iteration, where a step is :attr:`due`: blocks until its result is there, and takes it."""
        launched = self._in_flight.popleft()
        self._is_due = False
        result = launched.pending.result()
        began = time.perf_counter()
        now = self._clock()
        since, self._last_finish = max(launched.began_at, self._last_finish), now
        self._tell_prefill(launched.plan, now - since)
        self._gate.step_finished(launched.plan.step)
        self.scheduler.finish_step(result, now, seconds=now - since)
        self._flush()
        self.scheduler.statistics.own_seconds += time.perf_counter() - began

    def _tell_prefill(self, plan: StepPlan, seconds: float) -> None:
        """Let the store know how quick prefill is, by a step that did nothing else."""
        if self._store is not None and plan.runs and all(run.kind is RunKind.PREFILL for run in plan.runs):
            self._store.prefilled(sum(run.num_tokens for run in plan.runs), seconds)

    def _take_commands(self, commands: list[Command]) -> bool:
        for command in commands:
            match command:
                case AddRequest(request):
                    if self._is_draining:
                        msg = "the server is shutting down; send the request to another one"
                        self._emit([Failed(request.request_id, msg, status=503)])
                    else:
                        self.scheduler.add(request)
                case CancelRequest(request_id):
                    self.scheduler.cancel(request_id)
                case ResetCache():
                    self._reset(command)
                case Drain():
                    self._is_draining = True
                case Stop():
                    self._is_stopped = True
                    self.scheduler.fail_all(RequestError("the server is stopping", status=503))
        return bool(commands)

    def _reset(self, command: ResetCache) -> None:
        failure = None
        if command.tier is Tier.DEVICE:
            self.scheduler.reset_device_cache()
        elif command.tier is Tier.MEMORY:
            if self._store is None or not self._store.reset(command.tier):
                failure = "there is no memory tier; give --prefix-cache-memory at start-up to have one"
        else:
            failure = f"the {command.tier} tier cannot be reset"
        self._emit([CacheReset(command.reset_id, command.tier, failure)])

    def _poll_store(self) -> bool:
        if self._store is None:
            return False
        try:
            events = self._store.poll()
        except Poisoned as error:
            self.scheduler.quarantine_transfers()
            self.scheduler.fail_all(RequestError(f"the ranks lost account of each other: {error}", status=503))
            self._flush()
            raise
        now = self._clock()
        for event in events:
            self.scheduler.store_event(event, now)
        return bool(events)

    def _flush(self) -> None:
        events = self.scheduler.take_events()
        if events:
            self._emit(events)


class PeerLoop:
    """A peer's engine thread: executes the plans that rank zero sends, in order."""

    def __init__(self, runner: ModelRunner, *, gate: JobGate) -> None:
        self._runner = runner
        self._gate = gate

    def execute(self, data: bytes | memoryview) -> int:
        """Execute one encoded plan to its end; its step number. Blocks while the runner computes.

        Raises:
            msgspec.ValidationError, msgspec.DecodeError: not a plan.
        """
        plan = decode_plan(data)
        self._gate.wait_for_jobs(plan.needs_jobs)
        self._runner.launch(plan).result()
        self._gate.step_finished(plan.step)
        return plan.step
