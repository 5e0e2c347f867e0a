"""Scheduler, engine loop, oracle ranks and a memory store in one thread: to drive them step by step and compare texts.

For property tests and simulators. Every request's outcome is compared with the uncached reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine, NoGate
from flare_core.engine.request import (
    AddRequest,
    CancelRequest,
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Tokens,
)
from flare_core.engine.scheduler import Scheduler
from flare_core.keys import token_array
from flare_core.plan import StepPlan, TokenLogprobs
from flare_core.sampling import SamplingParams
from flare_core.testing.memory_store import MemoryPrefixStore
from flare_core.testing.oracle_config import OracleConfig
from flare_core.testing.oracle_reference import oracle_group, oracle_prompt_logprobs, oracle_text

__all__ = ["OracleWorld", "Outcome"]


@dataclass(slots=True)
class Outcome:
    """What came of one request so far."""

    prompt: Sequence[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | Failed | None = None
    is_checked: bool = False


class OracleWorld:
    """``scheduler_config`` decides page size, pool and rows; time is a count of the engine's steps.

    ``is_late``: the device lags as far behind as it may. ``watch_plan`` is shown every plan.
    """

    def __init__(
        self,
        config: OracleConfig,
        scheduler_config: SchedulerConfig,
        *,
        world_size: int = 1,
        lead: int = 0,
        with_store: bool = False,
        is_late: bool = False,
        watch_plan: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.config = config
        self.world_size = world_size
        self.outcomes: dict[str, Outcome] = {}
        self.now = 0.0
        self.group = oracle_group(
            config,
            world_size=world_size,
            page_tokens=scheduler_config.page_tokens,
            num_pages=scheduler_config.num_pages,
            num_row_slots=scheduler_config.max_sequences + scheduler_config.num_row_snapshots,
            is_late=is_late,
        )
        self.store = MemoryPrefixStore([runner.memory for runner in self.group.runners]) if with_store else None
        self.scheduler = Scheduler(scheduler_config, self.store)
        self.engine = Engine(
            self.scheduler,
            self.group,
            gate=self.store or NoGate(),
            store=self.store,
            send_plan=watch_plan or _ignore,
            emit=self._take,
            lead=lead,
            clock=lambda: self.now,
        )

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, salt: bytes = b"") -> None:
        """Send a request to the engine."""
        self.outcomes[request_id] = Outcome(prompt, params)
        request = EngineRequest(
            request_id=request_id, token_ids=token_array(prompt).tobytes(), params=params, salt=salt, arrival=self.now
        )
        self.engine.inbox.put([AddRequest(request)])

    def cancel(self, request_id: str) -> None:
        """Cancel a request."""
        self.engine.inbox.put([CancelRequest(request_id)])

    def step(self) -> bool:
        """One iteration of the engine, then a full count of pages and slots."""
        self.now += 1.0
        progressed = self.engine.step()
        self.scheduler.check()
        return progressed

    def run_until_rest(self, *, limit: int = 100_000) -> None:
        """Step until every request has ended and nothing is under way; then check all texts, and that nothing leaked.

        Raises:
            AssertionError: a text is wrong, something leaked, or ``limit`` steps did not suffice.
        """
        for _ in range(limit):
            progressed = self.step()
            if not progressed and not self.scheduler.num_unfinished and not self.scheduler.num_transfers:
                break
        else:
            raise AssertionError(f"{self.scheduler.num_unfinished} requests are unfinished after {limit} steps")
        self.scheduler.check_at_rest()
        self.check_outcomes()

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Outcome:
        """Serve one request to its end and to rest."""
        request_id = f"generate-{len(self.outcomes)}"
        self.add(request_id, prompt, params)
        self.run_until_rest()
        return self.outcomes[request_id]

    def check_outcomes(self) -> None:
        """Compare every outcome with the reference; cancelled ones with its beginning."""
        page_tokens = self.scheduler.config.page_tokens
        for request_id, outcome in self.outcomes.items():
            limit = self.scheduler.config.max_sequence_tokens - len(outcome.prompt)
            if outcome.is_checked or isinstance(outcome.end, Failed) or limit < 1:
                continue
            outcome.is_checked = outcome.end is not None
            sizes = {"world_size": self.world_size, "page_tokens": page_tokens}
            expected = oracle_text(self.config, outcome.prompt, outcome.params, **sizes)[:limit]
            if isinstance(outcome.end, Finished) and outcome.end.reason is FinishReason.CANCELLED:
                expected = expected[: len(outcome.token_ids)]
            elif outcome.params.prompt_logprobs is not None:
                entries = oracle_prompt_logprobs(self.config, outcome.prompt, outcome.params, **sizes)
                if entries != outcome.prompt_logprobs:
                    raise AssertionError(f"{request_id}: prompt log-probabilities differ")
            if outcome.token_ids != expected:
                raise AssertionError(f"{request_id}: {outcome.token_ids} instead of {expected}")

    def _take(self, events: list[EngineEvent]) -> None:
        for event in events:
            match event:
                case Tokens(request_id, token_ids, logprobs):
                    outcome = self._open(request_id)
                    outcome.token_ids.extend(token_ids)
                    outcome.logprobs.extend(logprobs or ())
                case PromptLogprobs(request_id, entries):
                    self._open(request_id).prompt_logprobs.extend(entries)
                case Finished() | Failed():
                    self._open(event.request_id).end = event
                case _:
                    pass

    def _open(self, request_id: str) -> Outcome:
        outcome = self.outcomes[request_id]
        if outcome.end is not None:
            raise AssertionError(f"{request_id}: an event comes after its end")
        return outcome


def _ignore(plan: StepPlan) -> None:
    del plan
