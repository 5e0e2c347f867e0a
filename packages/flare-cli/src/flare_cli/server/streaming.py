"""Runs one generation for one connection: as server-sent events, or collected into one answer.

Either way the client's going away cancels it. Knows ASGI; does not know the shape of answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from flare_cli.server.answer import OutputTotals, Renderer
from flare_cli.server.errors import EngineUnavailable, error_object, error_response
from flare_cli.server.generation import Generation, Piece
from flare_core.errors import RequestError

__all__ = ["ClientGone", "EventStream", "collect", "unless_gone"]

KEEP_ALIVE_SECONDS = 10.0
"""A comment is sent after this long without an event, and the headers at the latest, so that proxies keep waiting."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Result = TypeVar("Result")
Usage = Callable[[Sequence[OutputTotals]], dict[str, Any]]


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def unless_gone(work: Awaitable[Result], receive: Receive) -> Result:
    """The result of ``work``, which is cancelled when the client goes away first (then ``ClientGone``)."""
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientGone
    finally:
        for task in (running, gone):
            task.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(generation: Generation, num_outputs: int) -> list[OutputTotals]:
    """Everything the generation gives.

    Raises:
        EngineUnavailable, RequestError: as ``Generation.pieces``.
    """
    outputs = [OutputTotals() for _ in range(num_outputs)]
    async with generation:
        async for pieces in generation.pieces(idle_seconds=KEEP_ALIVE_SECONDS):
            for piece in pieces:
                outputs[piece.index].add(piece)
    return outputs


class EventStream:
    """An ASGI response of server-sent events. Until the first event a failure is still an ordinary error answer."""

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        *,
        num_outputs: int,
        usage: Usage,
        include_usage: bool,
        admission: AbstractContextManager[None],
    ) -> None:
        self._generation = generation
        self._renderer = renderer
        self._outputs = [OutputTotals() for _ in range(num_outputs)]
        self._usage = usage
        self._include_usage = include_usage
        self._admission = admission
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._admission:
                await unless_gone(self._run(send), receive)
        except ClientGone:
            return
        except (RequestError, EngineUnavailable) as error:
            if not self._has_begun:
                await error_response(error)(scope, receive, send)
                return
            # Begun and not finished: no finish reason and no [DONE], so that nobody takes it for an answer.
            status = error.status if isinstance(error, RequestError) else 503
            await self._send(send, _event(error_object(str(error), status=status)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, send: Send) -> None:
        async with self._generation as generation:
            async for pieces in generation.pieces(idle_seconds=KEEP_ALIVE_SECONDS):
                data = b"".join(self._render(piece) for piece in pieces) if pieces else b": waiting\n\n"
                if data:
                    await self._send(send, data)
        last = b"data: [DONE]\n\n"
        if self._include_usage:
            last = _event(self._renderer.usage_chunk(self._usage(self._outputs))) + last
        await self._send(send, last)

    def _render(self, piece: Piece) -> bytes:
        self._outputs[piece.index].add(piece)
        chunks = self._renderer.chunks(piece, self._outputs)
        if self._include_usage:
            chunks = [chunk | {"usage": None} for chunk in chunks]
        return b"".join(_event(chunk) for chunk in chunks)

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": data, "more_body": True})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
