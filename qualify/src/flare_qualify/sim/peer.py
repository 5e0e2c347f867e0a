"""A peer of a simulated run: the real peer service around one process, and the loop that executes plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from flare_cache.join import Finished
from flare_cache.peer_service import DRAIN_SECONDS, PeerService, ServiceEnd
from flare_cache.pool.agent import PoolAgent
from flare_cache.pool.agreement_messages import encode_pool_message
from flare_cli.control_group import PLAN
from flare_core.plan import StepPlan, StepResult, decode_plan
from flare_qualify.sim.joining import Joining
from flare_qualify.sim.links import SimLink
from flare_qualify.sim.pool_ranks import new_pool_agent
from flare_qualify.sim.process import RankProcess
from flare_transport.router import Router

__all__ = ["Peer"]

_EXIT_SECONDS = 0.3
_LOOK_SECONDS = 0.1


class Peer:
    """See the module. ``on_joined`` is told when the rank serves."""

    def __init__(self, process: RankProcess, on_joined: Callable[[RankProcess], None]) -> None:
        self.process = process
        self._on_joined = on_joined
        self.service = PeerService(
            run_id=process.context.run_id,
            rank=process.rank,
            on_end=self._service_ended,
            run_apart=self._drain,
            on_pool=self._leader_spoke,
        )
        self._pool: PoolAgent | None = None
        self._early: deque[StepPlan] = deque()
        process.on_step = self._step_over

    def begin(self, control: SimLink, record: SimLink) -> None:
        """Start links and join."""
        process = self.process
        setup = process.setup()
        setup.make_transport(self.service.finished_here, self.service.fault_here)
        self.service.attach(process, record)
        if process.pool_shelf is not None:
            self._pool = new_pool_agent(
                process, process.pool_shelf, say=lambda message: self.service.say(encode_pool_message(message))
            )
        joining = Joining(
            setup,
            {0: record},
            now=process.context.loop.now,
            on_joined=self._joined,
            on_failed=lambda reason: process.exit_within(_EXIT_SECONDS, f"join failed: {reason}"),
        )
        router = Router()
        self.service.route(router)
        joining.route(router, 0)
        record.start(router, pulse=self.service.pulse)
        plans = Router()
        plans.route(PLAN, lambda _, payload: self._plan_came(payload))
        plans.on_end(lambda _, end: process.exit_within(1.0, end.detail))
        control.start(plans, pulse=bytes)
        joining.begin_as_peer()

    def _joined(self, finished: Finished) -> None:
        del finished
        self.process.is_joined = True
        self.service.serve()
        self._on_joined(self.process)
        while self._early:
            self.process.device.submit(self._early.popleft())

    def _leader_spoke(self, payload: memoryview) -> None:
        if self._pool is not None:
            self._pool.receive(payload)

    def _plan_came(self, payload: memoryview) -> None:
        plan = decode_plan(payload)
        if self.process.is_joined:
            self.process.device.submit(plan)
        else:
            self._early.append(plan)

    def _step_over(self, result: StepResult) -> None:
        self.service.step_finished(result.step)

    def _drain(self, task: Callable[[], None]) -> None:
        """What waits is dropped at once; the end is told when nothing runs any more, or when time is up."""
        process = self.process
        deadline = process.context.loop.now + DRAIN_SECONDS

        def look() -> None:
            if process.close(0.0) or process.context.loop.now >= deadline:
                task()
            else:
                process.after(_LOOK_SECONDS, f"{process.name} drains", look)

        look()

    def _service_ended(self, end: ServiceEnd) -> None:
        process = self.process
        if not end.is_loss and end.is_drained:
            try:
                process.setup().save_hint([])
            except OSError:
                process.context.loop.note(f"{process.name} leaves no hint")
        process.exit_within(_EXIT_SECONDS, end.reason)
