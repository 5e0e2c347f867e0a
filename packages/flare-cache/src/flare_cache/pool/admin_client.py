"""An operator's connection to a manager: one question at a time. Blocks."""

from __future__ import annotations

import queue
from types import TracebackType

import msgspec

from flare_cache.pool.admin_messages import (
    POOL_ADMIN_REPLY,
    POOL_ADMIN_REQUEST,
    AdminReply,
    AdminRequest,
    Failed,
    decode_admin_reply,
    encode_admin,
)
from flare_cache.pool.client import PoolRefused, PoolUnavailable
from flare_transport import Address, Link, RemoteProtocolError, Router, Security, TransportError, dial_service

__all__ = ["AdminClient", "connect_admin"]

_PARTING_SECONDS = 1.0


class AdminClient:
    """Made by :func:`connect_admin`; a context manager."""

    def __init__(self, link: Link, address: Address) -> None:
        self._link = link
        self._address = address
        self._replies: queue.Queue[AdminReply | None] = queue.Queue()
        router = Router()
        router.route(POOL_ADMIN_REPLY, self._came)
        router.on_end(lambda *_: self._replies.put(None))
        link.start(router, pulse=lambda: b"")

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # In order, so that the manager's log does not call an operator lost.
        self._link.shutdown()
        self._link.wait_ended(_PARTING_SECONDS)
        self._link.close()

    def ask(self, request: AdminRequest, *, timeout_seconds: float = 600.0) -> AdminReply:
        """The answer. Raises PoolUnavailable, and PoolRefused with what the manager could not do."""
        try:
            self._link.send(POOL_ADMIN_REQUEST, encode_admin(request))
            reply = self._replies.get(timeout=timeout_seconds)
        except (queue.Empty, TransportError) as error:
            raise PoolUnavailable(f"{self._address}: no answer: {error}") from error
        if reply is None:
            raise PoolUnavailable(f"{self._address}: the link has ended")
        if isinstance(reply, Failed):
            raise PoolRefused(f"{self._address}: {reply.detail}")
        return reply

    def _came(self, link: Link, payload: memoryview) -> None:
        del link
        try:
            self._replies.put(decode_admin_reply(payload))
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"an answer that cannot be read: {error}") from error


def connect_admin(address: Address, *, key: bytes, security: Security, timeout_seconds: float = 5.0) -> AdminClient:
    """Connect. Raises PoolUnavailable (nobody answers) or PoolRefused (key, version, security)."""
    try:
        link, _ = dial_service(address, key=key, security=security, timeout_seconds=timeout_seconds)
    except OSError as error:
        raise PoolUnavailable(f"{address}: {error.strerror or error}") from error
    except TransportError as error:
        raise PoolRefused(str(error)) from error
    return AdminClient(link, address)
