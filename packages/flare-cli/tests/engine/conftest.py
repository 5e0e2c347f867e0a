"""A scripted engine behind the real application, reached in process over ASGI."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import jinja2.sandbox
import pytest

from flare_cli.server.app import make_app
from flare_cli.server.engine_port import (
    EngineRequest,
    EngineState,
    Finished,
    Lost,
    OutputEvent,
    OutputQueue,
    PromptScored,
    Tokens,
)
from flare_cli.server.errors import EngineUnavailable
from flare_cli.server.keys import KeyRing
from flare_cli.server.metrics import ServerMetrics
from flare_cli.server.model import Limits, ServedModel
from flare_cli.server.service import Service
from flare_cli.snapshot import ClusterSnapshot
from flare_cli.text.chat_template import ChatTemplate
from flare_cli.text.generation_config import GenerationDefaults
from flare_cli.text.tokenizer import ByteTokenizer
from flare_core.plan import TokenLogprobs
from flare_core.prefix import Tier

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@dataclass
class ScriptedEngine:
    """Answers every request with ``script`` (bytes of the output), one event a token, unless told otherwise."""

    script: bytes = b"Hello, world"
    state: EngineState = EngineState.READY
    detail: str = "serving"
    cached: dict[Tier, int] = field(default_factory=lambda: {Tier.DEVICE: 2, Tier.DISK: 1})
    lose_after: int | None = None
    holds: bool = False
    requests: list[EngineRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    resets: list[Tier] = field(default_factory=list)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def submit(self, request: EngineRequest, queue: OutputQueue, tag: int) -> str:
        if self.state is not EngineState.READY:
            raise EngineUnavailable(self.detail)
        self.requests.append(request)
        self.submitted.set()
        if not self.holds:
            for event in self._events(request):
                queue.put_nowait((tag, event))
        return str(next(self._ids))

    def _events(self, request: EngineRequest) -> Iterator[OutputEvent]:
        params = request.params
        if params.prompt_logprobs is not None:
            entries = [entry(token_id, params.prompt_logprobs) for token_id in request.token_ids[1:]]
            yield PromptScored(tuple(entries))
        ids = [byte + 3 for byte in self.script][: params.max_tokens]
        for at, token_id in enumerate(ids):
            if at == self.lose_after:
                yield Lost("rank 1 is gone")
                return
            logprobs = () if params.logprobs is None else (entry(token_id, params.logprobs),)
            yield Tokens((token_id,), logprobs)
        if len(ids) < params.max_tokens and params.stop_token_ids:
            yield Tokens((params.stop_token_ids[0],), () if params.logprobs is None else (entry(1, params.logprobs),))
        yield Finished("length" if len(ids) == params.max_tokens else "stop", self.cached)

    def end(self, request_id: str) -> None:
        self.ended.append(request_id)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def snapshot(self, *, with_records: bool = False) -> ClusterSnapshot:
        return ClusterSnapshot(state=str(self.state), model="bytes")

    async def reset(self, tier: Tier) -> None:
        self.resets.append(tier)


def entry(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple((token_id + i, -0.5 - i) for i in range(num_top))
    return TokenLogprobs(token_id, -0.5, 1, top)


def byte_model(**changes: Any) -> ServedModel:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    values: dict[str, Any] = {
        "name": "bytes",
        "created": 1,
        "vocab_size": 259,
        "max_model_len": 64,
        "tokenizer": ByteTokenizer(259, first_byte=3),
        "chat_template": ChatTemplate(environment.from_string(TEMPLATE), {}),
        "defaults": GenerationDefaults(eos_token_ids=(1,)),
    }
    return ServedModel(**(values | changes))


@dataclass
class Server:
    """The application with its engine; ``post`` and ``get`` run one request to its end."""

    service: Service
    engine: ScriptedEngine

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=make_app(self.service), client=options.pop("client", ("127.0.0.1", 9)))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)


@pytest.fixture
def make_server() -> Callable[..., Server]:
    def make(
        *,
        engine: ScriptedEngine | None = None,
        model: ServedModel | None = None,
        limits: Limits | None = None,
        keys: KeyRing | None = None,
    ) -> Server:
        engine = engine or ScriptedEngine()
        service = Service(
            engine=engine,
            model=model or byte_model(),
            limits=limits or Limits(),
            keys=keys or KeyRing({}),
            metrics=ServerMetrics(),
        )
        return Server(service, engine)

    return make


@pytest.fixture
def scripted_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def make_model() -> Callable[..., ServedModel]:
    return byte_model


@pytest.fixture
def sse() -> Callable[[httpx.Response], Sequence[Any]]:
    """The data of a stream's events, decoded; ``[DONE]`` as text."""

    def events(response: httpx.Response) -> Sequence[Any]:
        import json

        lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    return events
