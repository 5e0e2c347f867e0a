"""The target's answers to many prompts, by flare's own engine with continuous batching.

Knows requests and events of the engine; not texts, nor where answers are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flare_core.compute.loading import LoadedRunner
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine, NoGate
from flare_core.engine.request import AddRequest, EngineEvent, EngineRequest, Failed, Finished, Tokens
from flare_core.engine.scheduler import Scheduler
from flare_core.errors import FlareError
from flare_core.sampling import SamplingParams
from flare_spec.training.conversations import Conversation

__all__ = ["Question", "answer"]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt's tokens and how it is answered; temperature 0 is greedy."""

    tokens: tuple[int, ...]
    temperature: float
    seed: int


def answer(
    loaded: LoadedRunner, questions: Mapping[int, Question], *, max_tokens: int, max_sequences: int
) -> Iterator[tuple[int, Conversation]]:
    """Number and conversation of each question, as they end: at an end token, which is kept, or at ``max_tokens``.

    ``loaded`` needs pages for ``max_sequences`` of its longest sequences. Blocks while the model computes.

    Raises:
        FlareError: the engine refused a question; names it.
    """
    geometry = loaded.memory.geometry
    config = SchedulerConfig(
        page_tokens=geometry.page_tokens,
        num_pages=loaded.memory.num_pages,
        max_sequences=max_sequences,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.config.vocab_size,
        set_fingerprint=loaded.identity.fingerprint(),
        max_prefill_tokens=4096,
        max_mixed_tokens=1024,
    )
    events: list[EngineEvent] = []
    engine = Engine(
        Scheduler(config), loaded.runner, gate=NoGate(), store=None, send_plan=_nobody, emit=events.extend, lead=1
    )
    outputs: dict[int, list[int]] = {}
    waiting = iter(questions.items())
    is_busy = True
    while is_busy:
        while len(outputs) < 2 * max_sequences and (entry := next(waiting, None)) is not None:
            number, question = entry
            outputs[number] = []
            engine.inbox.put([AddRequest(_request(number, question, loaded.eos_token_ids, max_tokens))])
        is_busy = engine.step()
        for event in events:
            match event:
                case Tokens(request_id, token_ids):
                    outputs[int(request_id)].extend(token_ids)
                case Failed(request_id, message):
                    raise FlareError(f"prompt {request_id} was not answered: {message}")
                case Finished(request_id):
                    number = int(request_id)
                    prompt = questions[number].tokens
                    yield number, Conversation((*prompt, *outputs.pop(number)), len(prompt))
        events.clear()


def _nobody(_: object) -> None:
    """There are no peers."""


def _request(number: int, question: Question, stops: tuple[int, ...], max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        token_ids=np.asarray(question.tokens, dtype="<u4").tobytes(),
        params=SamplingParams(
            max_tokens=max_tokens, seed=question.seed, temperature=question.temperature, stop_token_ids=stops
        ),
    )
