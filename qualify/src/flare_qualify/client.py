"""A small client of any OpenAI-compatible server on a local port: one streamed completion, timed.

Standard library only, so that a qualification run needs nothing of the server's environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "ServerError", "TopLogprobs", "chat", "complete", "get_json", "post_json"]

TopLogprobs = tuple[tuple[str, float], ...]
"""The alternatives at one position, best first: (token text, log-probability)."""


class ServerError(Exception):
    """The server answered with an error status, or a stream ended without a finish reason.

    ``text`` and ``logprobs`` are what a stream had brought by then.
    """

    def __init__(self, status: int, message: str, *, text: str = "", logprobs: tuple[TopLogprobs, ...] = ()) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.text = text
        self.logprobs = logprobs


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion.

    Attributes:
        text: what was generated.
        ttft_seconds: from sending the request to the first chunk with content.
        prompt_tokens, completion_tokens: as the server counted them.
        cached_tokens: prompt tokens restored, by tier; tiers not mentioned by the server are 0.
        logprobs: top alternatives by output position.
    """

    text: str
    ttft_seconds: float
    total_seconds: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: dict[str, int] = field(default_factory=dict)
    logprobs: tuple[TopLogprobs, ...] = ()
    finish_reason: str = ""

    @property
    def total_cached(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.cached_tokens.values())


def _request(url: str, path: str, *, body: Any = None, timeout: float) -> Any:
    """The open connection and its response to a POST of ``body``, or to a GET without one."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout)
    data = None if body is None else json.dumps(body).encode()
    connection.request("GET" if data is None else "POST", path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status >= 400:
        text = response.read().decode(errors="replace")
        connection.close()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        raise ServerError(response.status, text[:500])
    return connection, response


def get_json(url: str, path: str, *, timeout: float = 30.0) -> Any:
    """GET ``path`` and decode the JSON answer. Blocks up to ``timeout`` seconds.

    Raises:
        ServerError: an error status. OSError: no server.
    """
    connection, response = _request(url, path, timeout=timeout)
    try:
        return json.loads(response.read())
    finally:
        connection.close()


def post_json(url: str, path: str, body: Any, *, timeout: float = 600.0) -> Any:
    """POST ``body`` as JSON and decode the answer; blocks and raises as :func:`get_json`."""
    connection, response = _request(url, path, body=body, timeout=timeout)
    try:
        return json.loads(response.read())
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON payloads of a server-sent event stream up to ``[DONE]``; comments are skipped."""
    for line in response:
        if line.startswith(b"data: "):
            payload = line[6:].strip()
            if payload == b"[DONE]":
                return
            yield json.loads(payload)


def _stream(url: str, path: str, body: dict[str, Any], timeout: float) -> Answer:
    start = time.perf_counter()
    connection, response = _request(url, path, body=body, timeout=timeout)
    text: list[str] = []
    logprobs: list[TopLogprobs] = []
    first = 0.0
    finish = ""
    usage: dict[str, Any] = {}
    failure = "the stream ended without a finish reason"
    try:
        for event in _events(response):
            if "error" in event:
                failure, finish = str(event["error"].get("message", event["error"])), ""
                break
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if not first and (piece or choice.get("logprobs") or choice.get("finish_reason")):
                    first = time.perf_counter()
                text.append(piece)
                logprobs.extend(_top_logprobs(choice.get("logprobs")))
                finish = choice.get("finish_reason") or finish
    except (OSError, http.client.HTTPException) as error:
        failure = f"the stream broke: {error!r}"
        finish = ""
    finally:
        connection.close()
    if not finish:
        raise ServerError(response.status, failure, text="".join(text), logprobs=tuple(logprobs))
    return Answer(
        text="".join(text),
        ttft_seconds=(first or time.perf_counter()) - start,
        total_seconds=time.perf_counter() - start,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=_cached_tokens(usage),
        logprobs=tuple(logprobs),
        finish_reason=finish,
    )


def _cached_tokens(usage: dict[str, Any]) -> dict[str, int]:
    """By tier where the server says so (flare), else everything under "device" (vLLM and others)."""
    tiers = dict.fromkeys(("device", "memory", "disk", "pool"), 0)
    split = (usage.get("flare") or {}).get("cached_tokens")
    if split is None:
        tiers["device"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    else:
        tiers.update(split)
    return tiers


def _top_logprobs(logprobs: dict[str, Any] | None) -> list[TopLogprobs]:
    if not logprobs:
        return []
    if logprobs.get("content") is not None:
        return [
            tuple((alternative["token"], alternative["logprob"]) for alternative in position["top_logprobs"])
            for position in logprobs["content"]
        ]
    return [tuple(position.items()) for position in logprobs.get("top_logprobs") or ()]


def complete(url: str, prompt: str | list[int], *, max_tokens: int, timeout: float = 600.0, **options: Any) -> Answer:
    """One streamed ``/v1/completions`` at temperature 0 unless ``options`` say otherwise.

    Raises:
        ServerError: an error status, an error event, or a stream without a finish reason.
    """
    body = {"model": options.pop("model", "default"), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}} | options
    return _stream(url, "/v1/completions", body, timeout)


def chat(url: str, content: str, *, max_tokens: int, timeout: float = 600.0, **options: Any) -> Answer:
    """One streamed ``/v1/chat/completions`` with a single user message; as :func:`complete`."""
    body = {"model": options.pop("model", "default"), "messages": [{"role": "user", "content": content}]}
    body |= {"max_tokens": max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return _stream(url, "/v1/chat/completions", body | options, timeout)
