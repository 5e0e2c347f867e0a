"""Every bound on a request, one below it, at it and one above it; what lies outside is refused, by name."""

from __future__ import annotations

import asyncio
import json

import pytest

from flare_cli.server.app import MAX_HEADER_BYTES, make_app
from flare_cli.server.model import Limits

CONTEXT, VOCABULARY = 64, 259
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return COMPLETIONS, {"prompt": "a", "max_tokens": 1} | fields


def chat(**fields):
    return CHAT, {"messages": MESSAGES, "max_tokens": 1} | fields


BOUNDS = {
    "n": (3, Limits(max_n=3), lambda count: completion(n=count)),
    "prompts times n": (6, Limits(max_choices=6), lambda count: completion(prompt=["a"] * count)),
    "stop strings": (3, Limits(max_stops=3), lambda count: completion(stop=["\n"] * count)),
    "length of a stop string": (9, Limits(max_stop_chars=9), lambda count: completion(stop=["s" * count])),
    "biased ids": (4, Limits(max_logit_bias=4), lambda count: completion(logit_bias={str(i): 1 for i in range(count)})),
    "a biased id": (VOCABULARY - 1, Limits(), lambda value: completion(logit_bias={str(value): 1})),
    "a bias": (100, Limits(), lambda value: completion(logit_bias={"5": value})),
    "a stop id": (VOCABULARY - 1, Limits(), lambda value: completion(stop_token_ids=[value])),
    "a prompt's id": (VOCABULARY - 1, Limits(), lambda value: completion(prompt=[5, value])),
    "logprobs": (20, Limits(), lambda count: completion(logprobs=count)),
    "top_logprobs": (20, Limits(), lambda count: chat(logprobs=True, top_logprobs=count)),
    "prompt_logprobs": (20, Limits(), lambda count: completion(prompt_logprobs=count)),
    "cache_salt": (1024, Limits(), lambda count: completion(cache_salt="s" * count)),
    "prompt tokens": (CONTEXT - 1, Limits(), lambda count: completion(prompt="a" * count)),
    "max_tokens in the context": (CONTEXT - 1, Limits(), lambda count: completion(max_tokens=count)),
    "max_tokens of the server": (5, Limits(max_output_tokens=5), lambda count: completion(max_tokens=count)),
    "min_tokens": (4, Limits(), lambda count: completion(max_tokens=4, min_tokens=count)),
    "temperature": (100, Limits(), lambda value: completion(temperature=value)),
    "presence_penalty": (2, Limits(), lambda value: completion(presence_penalty=value)),
    "top_p": (1, Limits(), lambda value: completion(top_p=value or 0.5)),
    "seed": ((1 << 63) - 1, Limits(), lambda value: completion(seed=value)),
    "template settings": (32, Limits(), lambda count: chat(chat_template_kwargs={f"s{i}": 1 for i in range(count)})),
    "a template setting": (4096, Limits(), lambda count: chat(chat_template_kwargs={"s": "v" * count})),
    "its name": (64, Limits(), lambda count: chat(chat_template_kwargs={"s" * count: 1})),
}


@pytest.mark.parametrize("offset", [-1, 0, 1], ids=["below", "at", "above"])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_request_is_taken_up_to_a_bound_and_refused_above_it(make_server, name, offset):
    bound, limits, request = BOUNDS[name]
    server = make_server(limits=limits)
    response = server.post(*request(bound + offset))
    if offset <= 0:
        assert response.status_code == 200, response.text
        return
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"]
    assert error["param"].partition(".")[0].partition("[")[0] in error["message"]
    assert server.engine.requests == []


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_is_read_up_to_its_bound(make_server, offset, is_declared):
    server = make_server(limits=Limits(max_body_bytes=1000))
    body = json.dumps({"prompt": "a", "user": ""}).encode()
    body = body.replace(b'""', b'"' + b"x" * (1000 + offset - len(body)) + b'"')
    assert len(body) == 1000 + offset

    async def parts():
        yield body[:500]
        yield body[500:]

    headers = {} if is_declared else {"transfer-encoding": "chunked"}
    response = server.request("POST", COMPLETIONS, content=body if is_declared else parts(), headers=headers)
    assert response.status_code == (413 if offset > 0 else 200)


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_headers_are_read_up_to_their_bound(make_server, offset):
    app = make_app(make_server().service)
    headers = [(b"host", b"server"), (b"x-pad", b"")]
    missing = MAX_HEADER_BYTES - sum(len(name) + len(value) for name, value in headers)
    headers[1] = (b"x-pad", b"p" * (missing + offset))
    scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": headers}
    statuses = []

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        statuses.append(message.get("status"))

    asyncio.run(app(scope, receive, send))
    assert statuses[0] == (431 if offset > 0 else 200)


@pytest.mark.parametrize("depth", [100, 100_000])
def test_a_body_of_any_depth_is_an_answer(make_server, depth):
    body = b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"
    response = make_server().request("POST", COMPLETIONS, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e9", "0x10", "", "\u00b2"])
def test_a_content_length_that_is_none_costs_nothing(make_server, length):
    server = make_server()
    headers = [("content-length", length.encode("latin-1"))]
    response = server.request("POST", COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code in {200, 400, 413}


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "request_",
    [
        completion(model=LONG),
        completion(**{LONG: 1}),
        completion(logit_bias={LONG: 1}),
        completion(response_format=LONG),
        chat(messages=[{"role": LONG, "content": "a"}]),
        chat(messages=[{"role": "user", "content": "a", LONG: 1}]),
        chat(messages=[{"role": "user", "content": [{"type": LONG}]}]),
        chat(chat_template_kwargs={LONG: 1}),
        ("/v1/cache/reset", {"tier": LONG}),
    ],
)
def test_an_error_repeats_little_of_what_was_sent(make_server, request_):
    response = make_server().post(*request_)
    assert 400 <= response.status_code < 500
    assert len(response.content) < 4096
