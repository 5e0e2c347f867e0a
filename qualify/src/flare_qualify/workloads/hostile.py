"""Requests that a server must survive: malformed, oversized, contradictory, and clients that go away early.

Each is bytes on a connection, so that any server on a local port can be asked. Nothing here knows flare but for the
names of fields that other servers ignore.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Hostile", "hostile_requests", "mutated_requests", "send"]

_REPLY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Hostile:
    """One request: bytes to send. ``leaves``: the client closes at once instead of waiting for an answer."""

    name: str
    data: bytes
    leaves: bool = False


def _post(path: str, body: bytes, **headers: str) -> bytes:
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()} | {"Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def _completion(name: str, **fields: Any) -> Hostile:
    body = {"prompt": "abcdefgh", "max_tokens": 2} | fields
    return Hostile(name, _post("/v1/completions", json.dumps(body).encode()))


def _chat(name: str, messages: Any, **fields: Any) -> Hostile:
    body = {"messages": messages, "max_tokens": 2} | fields
    return Hostile(name, _post("/v1/chat/completions", json.dumps(body).encode()))


def hostile_requests(*, vocab_size: int, max_len: int) -> Iterator[Hostile]:
    """The fixed list, for a server whose model has ``vocab_size`` ids and ``max_len`` positions."""
    yield from _bad_values(vocab_size, max_len)
    yield from _bad_salts()
    yield from _bad_chats()
    yield from _bad_bodies()
    yield from _bad_connections()


def _bad_values(vocab_size: int, max_len: int) -> Iterator[Hostile]:
    for n in (0, -1, 1 << 20, 1 << 62, 1.5, "3"):
        yield _completion(f"n {n}", n=n)
    for count in (-1, 0, max_len * 2, 1 << 31, 1 << 63, 1e300):
        yield _completion(f"max_tokens {count}", max_tokens=count)
    for token in (-1, vocab_size, vocab_size + 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63):
        yield _completion(f"token {token}", prompt=[5, token])
        yield _completion(f"stop token {token}", stop_token_ids=[token])
        yield _completion(f"bias of {token}", logit_bias={str(token): 1})
    for count in (-1, 0, 20, 21, 1 << 20, vocab_size):
        yield _completion(f"logprobs {count}", logprobs=count)
        yield _completion(f"prompt_logprobs {count}", prompt_logprobs=count)
    values: tuple[Any, ...] = (-1, 1e308, "hot", None, [], {})
    for value in values:
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed"):
            yield _completion(f"{name} {value}", **{name: value})
    yield _completion("empty prompt", prompt="")
    yield _completion("no ids", prompt=[])
    yield _completion("one id", prompt=[5])
    yield _completion("empty prompts", prompt=[[], []])
    yield _completion("mixed prompts", prompt=["a", 3, [4]])
    yield _completion("many prompts", prompt=["a"] * 4096)
    yield _completion("too long", prompt=[5] * min(max_len + 1, 300_000))
    yield _completion("stops", stop=["x" * 100_000] * 3)
    yield _completion("many stops", stop=[str(number) for number in range(10_000)])
    yield _completion("empty stop", stop="")
    yield _completion("min over max", min_tokens=10, max_tokens=2)
    yield _completion("echo with logprobs", echo=True, logprobs=3)
    yield _completion("infinite bias", logit_bias={"5": -100, "6": 100, "x": 3})
    yield _completion("large bias", logit_bias={str(token): -100 for token in range(5000)})
    yield _completion("every token forbidden", logit_bias={str(token): -100 for token in range(min(vocab_size, 300))})
    yield _completion("unknown field", no_such_field={"a": [1, 2]})
    yield _completion("another model", model="../../etc/passwd")
    yield _completion("structured", response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}})


def _bad_salts() -> Iterator[Hostile]:
    salts: tuple[Any, ...] = (
        "",
        "\0",
        "\ud800",
        "a" * 1024,
        "a" * 1025,
        "\N{PILE OF POO}" * 500,
        7,
        None,
        [],
        {"a": 1},
    )
    for number, salt in enumerate(salts):
        yield _completion(f"salt {number}", cache_salt=salt)
    raw = b'{"prompt": "abc", "max_tokens": 2, "cache_salt": "' + b"\xff\xfe\x80" + b'"}'
    yield Hostile("salt that is no UTF-8", _post("/v1/completions", raw))


def _bad_chats() -> Iterator[Hostile]:
    user = {"role": "user", "content": "hello"}
    yield _chat("no messages", [])
    yield _chat("not a list", "hello")
    yield _chat("odd role", [{"role": "{{ 7*7 }}", "content": "x"}])
    yield _chat(
        "template in the content", [{"role": "user", "content": "{% for a in range(9999999) %}{{a}}{% endfor %}"}]
    )
    yield _chat("no content", [{"role": "user"}])
    yield _chat("null content", [{"role": "user", "content": None}])
    yield _chat("an image", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}])
    yield _chat("many messages", [user] * 20_000)
    yield _chat("special tokens", [{"role": "user", "content": "<|end|><|start|><|im_end|>" * 50}])
    yield _chat("lone surrogate", [{"role": "user", "content": "\ud83d"}])
    yield _chat("template settings", [user], chat_template_kwargs={"a": {"b": {"c": 1}}, "messages": 3})
    yield _chat("a template", [user], chat_template="{{ ''.__class__.__mro__ }}")
    yield _chat("tools", [user], tools=[{"type": "function", "function": {"name": "x" * 9999}}])
    yield _chat("top log-probabilities alone", [user], top_logprobs=5)


def _bad_bodies() -> Iterator[Hostile]:
    bodies = {
        "nothing": b"",
        "not JSON": b"{",
        "a list": b"[]",
        "a number": b"1e999",
        "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "NaN": b'{"prompt": "a", "max_tokens": 2, "temperature": NaN}',
        "a long number": b'{"prompt": "a", "max_tokens": ' + b"9" * 5_000 + b"}",
        "twice the same": b'{"prompt": "a", "prompt": [3], "max_tokens": 2, "max_tokens": 1}',
        "no UTF-8": b'{"prompt": "\xff\xff", "max_tokens": 2}',
        "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
        "ten megabytes": b'{"prompt": "' + b"a" * 10_000_000 + b'"}',
    }
    for name, body in bodies.items():
        for path in ("/v1/completions", "/v1/chat/completions"):
            yield Hostile(f"{name} to {path}", _post(path, body))
    for path in ("/tokenize", "/detokenize", "/v1/cache/reset"):
        yield Hostile(f"an odd body to {path}", _post(path, b'{"tokens": [-1], "prompt": 3, "tier": "../x"}'))


def _bad_connections() -> Iterator[Hostile]:
    full = _post("/v1/completions", json.dumps({"prompt": "abc" * 50, "max_tokens": 500, "stream": True}).encode())
    yield Hostile("leaves at once", full, leaves=True)
    yield Hostile("leaves in the head", full[:40], leaves=True)
    yield Hostile("leaves in the body", full[:-5], leaves=True)
    yield Hostile("nothing sent", b"", leaves=True)
    yield Hostile("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64))
    yield Hostile("negative length", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n")
    yield Hostile("long header", b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000 + b"\r\n\r\n")
    yield Hostile("many headers", b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n")
    yield Hostile(
        "two lengths", _post("/v1/completions", b"{}").replace(b"\r\n\r\n", b"\r\nContent-Length: 99\r\n\r\n")
    )
    yield Hostile("bad chunks", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
    yield Hostile("unknown method", b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    yield Hostile("unknown path", b"GET /%00/..%2f..%2fetc HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")


def mutated_requests(rng: random.Random, count: int) -> Iterator[Hostile]:
    """Good requests with bytes changed, doubled or left out by chance."""
    good = [
        json.dumps(
            {"prompt": "abcdefgh", "max_tokens": 3, "temperature": 0.5, "stop": ["q"], "logprobs": 2, "seed": 4}
        ),
        json.dumps({"prompt": [4, 5, 6], "max_tokens": 3, "stream": True, "n": 2, "cache_salt": "s", "min_p": 0.1}),
        json.dumps({"prompt": "ab", "max_tokens": 2, "logit_bias": {"5": 1.5}, "stop_token_ids": [7], "top_k": 3}),
    ]
    for number in range(count):
        body = bytearray(rng.choice(good).encode())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            match rng.randrange(4):
                case 0:
                    body[at] = rng.randrange(256)
                case 1:
                    del body[at : at + rng.randint(1, 6)]
                case 2:
                    body[at:at] = body[at : at + rng.randint(1, 20)]
                case _:
                    body[at:at] = rng.choice((b"-", b"9" * 30, b"null", b"[[", b"\\ud800", b"1e400", b'"', b"{}"))
            body = body or bytearray(b"{")
        yield Hostile(f"mutation {number}", _post("/v1/completions", bytes(body)))


def send(url: str, request: Hostile, *, timeout: float = 60.0) -> int:
    """Send it; the status of the answer, 0 for none: the connection was closed, or the client left first."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=timeout) as connection:
        # A server may answer and close before it has read all.
        with contextlib.suppress(ConnectionError):
            connection.sendall(request.data)
        if request.leaves:
            return 0
        reply = b""
        with contextlib.suppress(ConnectionError):
            while len(reply) < _REPLY_BYTES and (piece := connection.recv(_REPLY_BYTES)):
                reply += piece
                if b"\r\n" in reply and not reply.startswith(b"HTTP/1.1 200"):
                    break
    words = reply.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
