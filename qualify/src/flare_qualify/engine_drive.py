"""Drives the engine of one rank without a server: requests in, the time until the last one has ended."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from flare_core.compute.loading import LoadedRunner
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine, NoGate
from flare_core.engine.request import AddRequest, EngineRequest
from flare_core.engine.scheduler import Scheduler

__all__ = ["PAGE_TOKENS", "serve_all"]

PAGE_TOKENS = 64


def serve_all(loaded: LoadedRunner, requests: Sequence[EngineRequest], *, num_pages: int, max_sequences: int) -> float:
    """Seconds from the first request to the last output, on a fresh scheduler."""
    config = SchedulerConfig(
        page_tokens=PAGE_TOKENS,
        num_pages=num_pages,
        max_sequences=max_sequences,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.config.vocab_size,
        set_fingerprint=loaded.identity.fingerprint(),
    )
    engine = Engine(
        Scheduler(config),
        loaded.runner,
        gate=NoGate(),
        store=None,
        send_plan=lambda plan: None,  # noqa: ARG005  one rank: nobody to send it to
        emit=lambda events: None,  # noqa: ARG005  only the time is wanted
    )
    engine.inbox.put([AddRequest(request) for request in requests])
    begin = perf_counter()
    while engine.step():
        pass
    return perf_counter() - begin
