"""What the HTTP server needs from an engine: requests in, events out. Values and one Protocol.

Knows neither processes nor links; ``engine_client`` implements it over the link to the worker process.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from flare_cli.snapshot import ClusterSnapshot
from flare_core.plan import TokenLogprobs
from flare_core.prefix import Tier
from flare_core.sampling import SamplingParams

__all__ = [
    "Engine",
    "EngineRequest",
    "EngineState",
    "Finished",
    "Lost",
    "OutputEvent",
    "OutputQueue",
    "PromptScored",
    "Tokens",
]


class EngineState(enum.StrEnum):
    """What ``/health`` says."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt and one output. ``tenant`` and ``cache_salt`` decide whose cached prefixes it may use."""

    token_ids: Sequence[int]
    params: SamplingParams
    tenant: str
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens, in order; ``logprobs`` is empty or has one entry for each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of prompt tokens, continuing where the last event ended; the first is for position 1."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an output: how many prompt tokens were restored from which tier, and how many tokens were
    drafted, and accepted.

    ``reason`` is "stop", "length", or "cancelled" after ``Engine.end``.
    """

    reason: str
    cached_tokens: Mapping[Tier, int] = field(default_factory=dict)
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """The last event of an output that will not be finished. ``status`` is the HTTP status."""

    message: str
    status: int = 503


OutputEvent: TypeAlias = Tokens | PromptScored | Finished | Lost
OutputQueue: TypeAlias = "asyncio.Queue[tuple[int, OutputEvent]]"


class Engine(Protocol):
    """Called on the event loop's thread; nothing blocks."""

    @property
    def state(self) -> EngineState: ...

    @property
    def detail(self) -> str:
        """A sentence about the state, for people."""
        ...

    def submit(self, request: EngineRequest, queue: OutputQueue, tag: int) -> str:
        """Start an output; its events are put into ``queue`` with ``tag``. Returns its id.

        Raises:
            EngineUnavailable: starting, draining or lost.
        """
        ...

    def end(self, request_id: str) -> None:
        """The output is long enough: its ``Finished`` is to come now, of whatever reason. Ignored once it has come."""
        ...

    def cancel(self, request_id: str) -> None:
        """Give an output up; no event of it is put any more. An id that has finished is ignored."""
        ...

    async def snapshot(self, *, with_records: bool = False) -> ClusterSnapshot:
        """The cluster as it is now; the last known one where the worker does not answer in a second."""
        ...

    async def reset(self, tier: Tier) -> None:
        """Forget what the tier holds and nothing uses. Raises ``EngineUnavailable``, ``RequestError``."""
        ...
