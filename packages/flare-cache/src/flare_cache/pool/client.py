"""A rank's connection to the pool's manager: requests with their answers, and bulk connections of the same session.

Registered when it is made. Threads: the link's own, and one that ends requests whose time is up. What the answers
mean for records is not known here.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from flare_cache.pool.messages import (
    POOL_REPLY,
    POOL_REQUEST,
    Refused,
    Register,
    Registered,
    Reply,
    Request,
    decode_reply,
    encode_request,
)
from flare_transport import (
    Address,
    Link,
    LinkEnd,
    LinkSettings,
    QueueFull,
    RemoteProtocolError,
    Router,
    Security,
    ServiceSession,
    TransportError,
    dial_bulk,
    dial_service,
    transfer_key,
)
from flare_transport.bulk_socket import set_bulk_options

__all__ = ["PoolClient", "PoolRefused", "PoolUnavailable", "connect_to_pool"]

_LINK = LinkSettings(drain_seconds=0.5)
_log = logging.getLogger(__name__)

OnReply = Callable[[Reply | None], None]


class PoolUnavailable(TransportError, OSError):
    """The manager cannot be asked: the link has ended, or no answer came in time."""


class PoolRefused(TransportError):
    """The manager will not have this rank; the message says why."""


@dataclass(slots=True)
class _Pending:
    on_reply: OnReply
    due_at: float


@dataclass(slots=True, eq=False)
class PoolClient:
    """See the module; made by :func:`connect_to_pool`. Thread-safe.

    Attributes:
        address, session: of the connection.
        registered: what the manager answered.
    """

    address: Address
    session: ServiceSession
    registered: Registered
    _link: Link
    _requests: _Requests

    @property
    def epoch(self) -> bytes:
        """Of the manager's process."""
        return self.registered.epoch

    @property
    def manager(self) -> str:
        """Its name, for people."""
        return f"{self.registered.manager} at {self.address}"

    @property
    def is_open(self) -> bool:
        """The session lasts: what it granted may be used."""
        return self._requests.lost is None

    def request(self, message: Request, *, timeout_seconds: float) -> Reply:
        """Ask, and wait for the answer. Raises PoolUnavailable."""
        return self._requests.ask(message, timeout_seconds)

    def request_later(self, message: Request, on_reply: OnReply, *, timeout_seconds: float) -> None:
        """Ask; ``on_reply`` is called once, from any thread: None when the link ended or the time was up."""
        self._requests.send(message, on_reply, timeout_seconds)

    def open_bulk(self, *, timeout_seconds: float) -> socket.socket:
        """One more bulk connection. Blocks. Raises PoolUnavailable."""
        try:
            return set_bulk_options(dial_bulk(self.address, self.session, timeout_seconds=timeout_seconds))
        except (OSError, TransportError) as error:
            raise PoolUnavailable(f"no bulk connection to {self.address}: {error}") from error

    def transfer_key(self, transfer: bytes) -> bytes:
        """The key that a granted transfer's units are proven with."""
        return transfer_key(self.session.key, transfer)

    def close(self) -> None:
        """End the session. Blocks shortly."""
        self._link.close()


class _Requests:
    """Questions that wait for an answer, by number."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._link: Link | None = None
        self._numbers: Iterator[int] = itertools.count(1)
        self._changed = threading.Condition()
        self._pending: dict[int, _Pending] = {}
        self.lost: str | None = None

    def start(self, link: Link) -> None:
        self._link = link
        router = Router()
        router.route(POOL_REPLY, self._came)
        router.on_end(self._ended)
        # Both sides send heartbeats: a manager that is stopped is lost within seconds.
        link.start(router, pulse=lambda: b"")
        threading.Thread(target=self._expire, name="flare pool requests", daemon=True).start()

    def send(self, message: Request, on_reply: OnReply, timeout_seconds: float) -> None:
        number = next(self._numbers)
        pending = _Pending(on_reply, time.monotonic() + timeout_seconds)
        with self._changed:
            is_lost = self.lost is not None
            if not is_lost:
                self._pending[number] = pending
                self._changed.notify_all()
        if is_lost or self._link is None:
            on_reply(None)
            return
        try:
            self._link.send(POOL_REQUEST, encode_request(number, message))
        except QueueFull as error:
            self._link.fail(str(error))
        except TransportError:
            self._settle(number, None)

    def ask(self, message: Request, timeout_seconds: float) -> Reply:
        answered = threading.Event()
        replies: list[Reply | None] = []

        def take(reply: Reply | None) -> None:
            replies.append(reply)
            answered.set()

        self.send(message, take, timeout_seconds)
        answered.wait()
        reply = replies[0]
        if reply is None:
            what = self.lost or f"no answer to {type(message).__name__} within {timeout_seconds:.1f} s"
            raise PoolUnavailable(f"the pool's manager: {what}")
        return reply

    def _came(self, link: Link, payload: memoryview) -> None:
        try:
            number, reply = decode_reply(payload)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"a pool reply that cannot be read: {error}") from error
        del link
        self._settle(number, reply)

    def _settle(self, number: int, reply: Reply | None) -> None:
        with self._changed:
            pending = self._pending.pop(number, None)
        if pending is None:
            return  # it came after its time
        try:
            pending.on_reply(reply)
        except Exception:  # noqa: BLE001 - the boundary of whoever asked; the link goes on
            _log.exception("what waited for an answer of the pool failed")

    def _ended(self, link: Link, end: LinkEnd) -> None:
        del link
        with self._changed:
            self.lost = end.detail
            numbers = list(self._pending)
            self._changed.notify_all()
        for number in numbers:
            self._settle(number, None)
        self._on_lost(end.detail)

    def _expire(self) -> None:
        while True:
            with self._changed:
                if self.lost is not None:
                    return
                now = time.monotonic()
                late = [number for number, pending in self._pending.items() if pending.due_at <= now]
                if not late:
                    due = min((pending.due_at for pending in self._pending.values()), default=None)
                    self._changed.wait(None if due is None else due - now)
                    continue
            for number in late:
                self._settle(number, None)


def connect_to_pool(
    address: Address,
    *,
    key: bytes,
    security: Security,
    register: Register,
    on_lost: Callable[[str], None],
    timeout_seconds: float = 5.0,
) -> PoolClient:
    """Open a session with a manager and register this rank. Blocks for at most about ``timeout_seconds``.

    Args:
        address: where the manager listens.
        key: the pool's key, 32 bytes.
        security: TLS or plaintext, as the manager has it.
        register: what this rank says of itself.
        on_lost: called once, from the link's thread, when the link has ended for whatever reason.

    Raises:
        PoolUnavailable: nobody answers, or not in time.
        PoolRefused: the key, the security, the version or what the rank says of itself is not what it should be.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        link, session = dial_service(address, key=key, security=security, timeout_seconds=timeout_seconds, link=_LINK)
    except OSError as error:
        raise PoolUnavailable(f"{address}: {error.strerror or error}") from error
    except TransportError as error:
        raise PoolRefused(f"{address}: {error}") from error
    requests = _Requests(on_lost)
    requests.start(link)
    try:
        reply = requests.ask(register, max(0.1, deadline - time.monotonic()))
        match reply:
            case Registered():
                return PoolClient(address, session, reply, link, requests)
            case Refused(reason=reason, detail=detail):
                raise PoolRefused(f"{address}: {reason}: {detail}" if detail else f"{address}: {reason}")
            case _:
                raise PoolRefused(f"{address} answers a registration with {type(reply).__name__}")
    except BaseException:
        link.close()
        raise
