"""HTTP requests, through the real application in process: what an API tenant may send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from flare_cli.server.app import make_app
from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, Violation, require
from flare_qualify.fuzz.targets.stub_engine import stub_service
from flare_qualify.fuzz.tree import ODD_VALUES, changed

__all__ = ["HTTP", "ODD_JSON", "SAMPLES"]

EXECUTION_SECONDS = 10.0

_SAMPLING = {
    "model": "bytes",
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "seed": 7,
    "n": 2,
    "stop": ["end", "\n"],
    "stop_token_ids": [3],
    "min_tokens": 1,
    "ignore_eos": True,
    "cache_salt": "salt",
    "user": "someone",
}
_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "refusal": None},
]
SAMPLES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "Hello"}),
    ("/v1/completions", {"prompt": [3, 4, 5], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 2, **_SAMPLING}),
    ("/v1/completions", {"prompt": [[3], [4]], "prompt_logprobs": 1, "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": _MESSAGES, **_SAMPLING}),
    ("/v1/chat/completions", {"messages": _MESSAGES[:1], "logprobs": True, "top_logprobs": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "chat_template_kwargs": {"enable_thinking": False}, "tools": []}),
    ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    ("/tokenize", {"messages": _MESSAGES}),
    ("/detokenize", {"tokens": [75, 104, 0]}),
    ("/v1/cache/reset", {"tier": "device"}),
)
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/cache/reset",
    "/v1/models",
    "/v1/models/bytes",
    "/health",
    "/metrics",
    "/v1/cluster",
    "/../etc/passwd",
    "/v1/models/\u00e9%s{0}",
)
ODD_JSON: tuple[Any, ...] = (
    *(value for value in ODD_VALUES if not isinstance(value, bytes)),
    "\ud800",
    float("nan"),
    float("inf"),
    10**400,
    "{{ messages.__class__ }}",
    "{% for i in range(10**9) %}{% endfor %}",
)
_ODD_TEXT = (b'{"prompt":"\\ud800"}', b'{"prompt":"\xff"}', b"[" * 5000, b'{"a":' * 3000, b"\xef\xbb\xbf{}", b"null")


class _Exchange:
    """One request over the application's own interface, and what came of it."""

    def __init__(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: list[bytes]) -> None:
        self._parts = body
        self._over = asyncio.Event()
        self.status = 0
        self.answer = bytearray()
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 9),
            "server": ("127.0.0.1", 80),
        }

    async def receive(self) -> Message:
        """The body in its parts; then nothing, as from a client that waits."""
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keep what is answered."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.answer += message.get("body", b"")


def _body(choices: Choices) -> tuple[str, bytes]:
    way = choices.integer(0, 7)
    if way == 0:
        return choices.pick(_PATHS), choices.rest()
    path, sample = choices.pick(SAMPLES)
    if way == 1:
        return path, choices.pick(_ODD_TEXT)
    tree: Any = sample
    for _ in range(choices.integer(0, 3)):
        tree = changed(tree, choices, ODD_JSON)
    try:
        text = json.dumps(tree, ensure_ascii=choices.flag())
    except RecursionError:
        text = "{}"
    if choices.integer(0, 15) == 15:
        path = choices.pick(_PATHS)
    return path, text.encode("utf-8", "surrogatepass")


def _headers(choices: Choices, body: bytes) -> list[tuple[bytes, bytes]]:
    length = choices.pick((str(len(body)).encode(),) * 13 + (b"9" * 5000, b"-1", b"1e3"))
    headers = [(b"host", b"server"), (b"content-type", b"application/json"), (b"content-length", length)]
    if choices.integer(0, 15) == 15:
        headers.append((b"authorization", b"Bearer \xe9 \x00" + choices.piece(40)))
    return headers


async def _run(app: ASGIApp, exchange: _Exchange) -> None:
    async with asyncio.timeout(EXECUTION_SECONDS):
        await app(exchange.scope, exchange.receive, exchange.send)


def _check(exchange: _Exchange) -> None:
    status, answer = exchange.status, bytes(exchange.answer)
    what = f"{exchange.scope['method']} {exchange.scope['path']}: {status} {answer[:300]!r}"
    require(200 <= status < 500, what)
    if status >= 400:
        error = json.loads(answer)["error"]
        require(isinstance(error["message"], str) and bool(error["message"]), f"an error without a message: {what}")
        require(len(answer) < 4096, f"an error of {len(answer)} bytes")
    elif answer.startswith((b"data: ", b":")):
        events = [line[6:] for line in answer.decode().split("\n\n") if line.startswith("data: ")]
        require(events[-1] == "[DONE]", f"a stream without its end: {what}")
        for event in events[:-1]:
            json.loads(event, parse_constant=_refuse_constant)
    elif answer.startswith(b"{"):
        json.loads(answer, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise Violation(f"{name} in an answer")


@contextlib.contextmanager
def _open() -> Iterator[Execute]:
    service = stub_service()
    app = make_app(service)
    loop = asyncio.new_event_loop()

    def execute(data: bytes) -> None:
        choices = Choices(data)
        method = choices.pick(("POST",) * 7 + ("GET",))
        path, body = _body(choices)
        headers = _headers(choices, body)
        cut = choices.integer(0, len(body)) if choices.flag() else 0
        exchange = _Exchange(method, path, headers, [body[:cut], body[cut:]])
        loop.run_until_complete(_run(app, exchange))
        _check(exchange)
        require(service.num_requests == 0, f"{service.num_requests} requests are held in work")

    try:
        yield execute
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def _seeds() -> Iterator[bytes]:
    for number in range(len(SAMPLES)):
        yield bytes((0, 2, number, 0, 0, 1))
        for place in range(0, 24, 2):
            yield bytes((0, 3, number, 1, place, place % 8, place * 5 % 34, 1, 0, 0, 1, 0))
    for number in range(len(_ODD_TEXT)):
        yield bytes((0, 1, number % len(SAMPLES), number))
    for number in range(len(_PATHS)):
        yield bytes((number % 8, 0, number)) + b'{"prompt": "a"}'


HTTP = Target(
    "http",
    "No request's content is answered by 5xx, kills the server, or reaches the engine out of bounds.",
    _open,
    _seeds,
    words=(b'"prompt"', b"[[", b'{"', b"\\ud800", b"1e999", b"null", b"99999999999999999999"),
)
