"""Keeps slow and idle connections from holding the server: a bound on connections, and a deadline for each header.

Wraps uvicorn's protocol, which bounds the size of a header and the pause between requests, but neither the time in
which a header arrives nor what a client that never speaks may hold. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

__all__ = ["TICK_SECONDS", "guarded_protocol"]

TICK_SECONDS = 5.0
"""A connection without a whole header at two ticks in a row is closed."""

_NEVER = object()


def guarded_protocol(*, max_connections: int, tick_seconds: float = TICK_SECONDS) -> Any:
    """What uvicorn is to make its connections with; connections beyond ``max_connections`` are closed at once."""
    is_open: set[_Connection] = set()

    def make(**options: Any) -> _Connection:
        return _Connection(H11Protocol(**options), is_open, max_connections, tick_seconds)

    return make


class _Connection:
    """An ``asyncio.Protocol`` in front of uvicorn's."""

    def __init__(
        self, inner: H11Protocol, is_open: set[_Connection], max_connections: int, tick_seconds: float
    ) -> None:
        self._inner = inner
        self._is_open = is_open
        self._max_connections = max_connections
        self._tick_seconds = tick_seconds
        self._seen: object = _NEVER
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        if len(self._is_open) >= self._max_connections:
            transport.abort()
            return
        self._is_open.add(self)
        self._inner.connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        if self in self._is_open:
            self._inner.data_received(data)

    def eof_received(self) -> None:
        if self in self._is_open:
            self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._is_open:
            self._is_open.remove(self)
            self._inner.connection_lost(error)
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        cycle: RequestResponseCycle | None = self._inner.cycle
        is_answering = cycle is not None and not cycle.response_complete
        is_paused = self._inner.timeout_keep_alive_task is not None  # uvicorn minds the pause between requests
        if not is_answering and not is_paused and self._seen is cycle:
            self._inner.transport.abort()
            return
        self._seen = _NEVER if is_answering or is_paused else cycle
        self._arm()
