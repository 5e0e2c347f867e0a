"""The scheduler and the torch runner together: batching, chunking, preemption and prefix hits change no token."""

from __future__ import annotations

import numpy as np
import pytest

from flare_core.compute.loading import load_runner
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine, NoGate
from flare_core.engine.request import AddRequest, EngineRequest, Finished, Tokens
from flare_core.engine.scheduler import Scheduler
from flare_core.sampling import SamplingParams


def serve(directory, digest_cache, requests, *, num_pages=200, max_sequences=8, lead=0, **settings):
    """Tokens and usage by request id; every page is free or cached at the end."""
    loaded = load_runner(
        directory, page_tokens=16, num_pages=num_pages, max_sequences=max_sequences, digest_cache=digest_cache
    )
    config = SchedulerConfig(
        page_tokens=16,
        num_pages=num_pages,
        max_sequences=max_sequences,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.config.vocab_size,
        set_fingerprint=loaded.identity.fingerprint(),
        **settings,
    )
    events = []
    engine = Engine(
        Scheduler(config),
        loaded.runner,
        gate=NoGate(),
        store=None,
        send_plan=lambda plan: None,
        emit=events.extend,
        lead=lead,
    )
    engine.inbox.put([AddRequest(request) for request in requests])
    while engine.step():
        pass
    outputs = {request.request_id: [] for request in requests}
    usage = {}
    for event in events:
        match event:
            case Tokens(request_id, token_ids):
                outputs[request_id].extend(token_ids)
            case Finished(request_id, _, used):
                usage[request_id] = used
    assert set(usage) == set(outputs)
    return outputs, usage, engine.scheduler.statistics


def make_requests(num_requests, *, shared=40, temperature=0.0, num_tokens=6):
    generator = np.random.default_rng(3)
    head = generator.integers(0, 3000, shared)
    return [
        EngineRequest(
            request_id=f"r{index}",
            token_ids=np.concatenate([head, generator.integers(0, 3000, 3 + 9 * index)]).astype("<u4").tobytes(),
            params=SamplingParams(
                max_tokens=num_tokens + 3 * index, temperature=temperature, seed=index, presence_penalty=0.3
            ),
        )
        for index in range(num_requests)
    ]


@pytest.fixture
def alone(checkpoint, digest_cache):
    def run(requests):
        outputs = {}
        for request in requests:
            outputs |= serve(checkpoint("llama"), digest_cache, [request])[0]
        return outputs

    return run


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continuous_batching_gives_each_request_its_own_text(lead, temperature, checkpoint, digest_cache, alone):
    requests = make_requests(6, temperature=temperature)
    outputs, usage, _ = serve(checkpoint("llama"), digest_cache, requests, lead=lead)
    assert outputs == alone(requests)
    assert [used.completion_tokens for used in usage.values()] == [len(tokens) for tokens in outputs.values()]


@pytest.mark.parametrize("lead", [0, 1])
def test_preemption_and_small_chunks_change_no_token(lead, checkpoint, digest_cache, alone):
    requests = make_requests(6, shared=4, num_tokens=40)
    outputs, _, statistics = serve(
        checkpoint("llama"),
        digest_cache,
        requests,
        num_pages=14,
        lead=lead,
        max_prefill_tokens=24,
        max_mixed_tokens=16,
    )
    assert statistics.num_preemptions > 0
    assert outputs == alone(requests)
