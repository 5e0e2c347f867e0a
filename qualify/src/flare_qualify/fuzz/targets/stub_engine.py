"""An engine for the HTTP targets that answers at once, and checks what the HTTP server lets through to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import jinja2.sandbox
import msgspec

from flare_cli.server.engine_port import EngineRequest, EngineState, Finished, OutputQueue, PromptScored, Tokens
from flare_cli.server.keys import KeyRing
from flare_cli.server.metrics import ServerMetrics
from flare_cli.server.model import Limits, ServedModel
from flare_cli.server.service import Service
from flare_cli.snapshot import ClusterSnapshot
from flare_cli.text.chat_template import ChatTemplate
from flare_cli.text.generation_config import GenerationDefaults
from flare_cli.text.tokenizer import ByteTokenizer
from flare_core.keys import tenant_salt
from flare_core.plan import TokenLogprobs
from flare_core.prefix import Tier
from flare_core.sampling import MAX_LOGPROBS, SamplingParams
from flare_qualify.fuzz.target import require

__all__ = ["LIMITS", "StubEngine", "stub_service"]

VOCABULARY = 259
CONTEXT = 64
LIMITS = Limits(max_body_bytes=64 << 10, max_n=4, max_choices=8, max_stops=4, max_stop_chars=64, max_logit_bias=8)
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


class StubEngine:
    """Implements the HTTP server's port to an engine: every output is a few bytes, there before anybody waits."""

    def __init__(self) -> None:
        self.state = EngineState.READY
        self.detail = "serving"
        self._ids: Iterator[int] = itertools.count()

    def submit(self, request: EngineRequest, queue: OutputQueue, tag: int) -> str:
        """Check the request, then answer it."""
        _check(request)
        params = request.params
        if params.prompt_logprobs is not None:
            scored = tuple(_entry(token, params.prompt_logprobs) for token in request.token_ids[1:])
            queue.put_nowait((tag, PromptScored(scored)))
        # Halves of a character and a special id are among the output.
        for token in (75, 198, 0, 108)[: params.max_tokens]:
            logprobs = () if params.logprobs is None else (_entry(token, params.logprobs),)
            queue.put_nowait((tag, Tokens((token,), logprobs)))
        queue.put_nowait((tag, Finished("stop", {Tier.DISK: 1})))
        return str(next(self._ids))

    def end(self, request_id: str) -> None:
        """It has ended already."""

    def cancel(self, request_id: str) -> None:
        """It has ended already."""

    async def snapshot(self, *, with_records: bool = False) -> ClusterSnapshot:
        """Nothing but the state."""
        del with_records
        return ClusterSnapshot(state=str(self.state), model="bytes")

    async def reset(self, tier: Tier) -> None:
        """There is nothing to forget."""


def _entry(token: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, tuple((token + index, -0.5 - index) for index in range(num_top)))


def _check(request: EngineRequest) -> None:
    """What the HTTP server promises the engine of every request."""
    params: SamplingParams = request.params
    require(0 < len(request.token_ids) < CONTEXT, f"a prompt of {len(request.token_ids)} tokens")
    require(all(0 <= token < VOCABULARY for token in request.token_ids), "a token id outside the vocabulary")
    require(1 <= params.max_tokens <= CONTEXT - len(request.token_ids), f"max_tokens {params.max_tokens}")
    require(0 <= params.min_tokens <= max(params.max_tokens, 1), f"min_tokens {params.min_tokens}")
    require(0 <= params.seed < 1 << 64, f"seed {params.seed}")
    floats = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        *(value for _, value in params.logit_bias),
    )
    require(all(math.isfinite(value) for value in floats), f"a value that is not finite in {floats}")
    require(params.temperature >= 0 and 0 < params.top_p <= 1 and params.repetition_penalty > 0, "a value out of range")
    require(0 <= params.top_k < 1 << 31, f"top_k {params.top_k}")
    require(all(0 <= token < VOCABULARY for token in params.stop_token_ids), "a stop id outside the vocabulary")
    require(all(0 <= token < VOCABULARY for token, _ in params.logit_bias), "a biased id outside the vocabulary")
    for count in (params.logprobs, params.prompt_logprobs):
        require(count is None or 0 <= count <= MAX_LOGPROBS, f"{count} log-probabilities")
    require(len(request.cache_salt) <= 1024, "a salt over its limit")
    require(len(tenant_salt(bytes(32), request.tenant, request.cache_salt)) == 32, "a salt of another length")
    msgspec.msgpack.encode(params)


def stub_service() -> Service:
    """A server's state over the stub engine and a model of bytes, without API keys."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    model = ServedModel(
        name="bytes",
        created=1,
        vocab_size=VOCABULARY,
        max_model_len=CONTEXT,
        tokenizer=ByteTokenizer(VOCABULARY, first_byte=3),
        chat_template=ChatTemplate(environment.from_string(_TEMPLATE), {}),
        defaults=GenerationDefaults(eos_token_ids=(1,)),
    )
    return Service(engine=StubEngine(), model=model, limits=LIMITS, keys=KeyRing({}), metrics=ServerMetrics())
