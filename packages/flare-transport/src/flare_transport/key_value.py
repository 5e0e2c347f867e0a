"""Key-value clients on every rank, over the control links; the table lives on rank zero. Owns waiting and timeouts.

Knows nothing of torch: `torch.distributed.Store` is subclassed elsewhere around a `KeyValue`.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from flare_transport.errors import KeyValueError, KeyValueTimeoutError, LinkLost, QueueFull, RemoteProtocolError
from flare_transport.frame_types import KEY_VALUE_REPLY, KEY_VALUE_REQUEST
from flare_transport.key_value_table import (
    AddRequest,
    Addressed,
    Answer,
    CancelRequest,
    CheckRequest,
    CompareSetRequest,
    CountRequest,
    DeleteRequest,
    GetRequest,
    KeyValueTable,
    Reply,
    Request,
    SetRequest,
    WaitRequest,
)
from flare_transport.link import Link
from flare_transport.router import LinkEnd, Router

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "KeyValue", "KeyValueService", "key_value_over"]

DEFAULT_TIMEOUT_SECONDS = 300.0

_T = TypeVar("_T", bytes, int, bool)


class KeyValue:
    """One rank's client. Calls block until rank zero answers; any thread but a link's I/O thread may make them.

    Raises `KeyValueTimeoutError` (a key was not set in time), `KeyValueError` (the table is full, or not a number),
    `LinkLost` (rank zero is gone), `LocalProtocolError` (key and value over 1 MiB).
    """

    def __init__(self, post: Callable[[Request], None]) -> None:
        self._post = post
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[int, Future[Answer]] = {}
        self._lost: str | None = None

    def set(self, key: str, value: bytes, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Set a key."""
        self._ask(SetRequest(next(self._ids), key, value), timeout_seconds)

    def get(self, key: str, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> bytes:
        """Return the value of a key, waiting until it is set."""
        return _expect(bytes, self._ask(GetRequest(next(self._ids), key), timeout_seconds))

    def add(self, key: str, amount: int, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> int:
        """Add to a counter, 0 where unset, and return its new value; stored as decimal text."""
        return _expect(int, self._ask(AddRequest(next(self._ids), key, amount), timeout_seconds))

    def wait(self, keys: Sequence[str], *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Wait until every key is set."""
        self._ask(WaitRequest(next(self._ids), list(keys)), timeout_seconds)

    def check(self, keys: Sequence[str], *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> bool:
        """Return whether every key is set now."""
        return _expect(bool, self._ask(CheckRequest(next(self._ids), list(keys)), timeout_seconds))

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> bytes:
        """Set a key to `desired` if it holds `expected`, or is unset and `expected` is empty; return what it now holds.

        Where it is unset and stays so, `expected` is returned, as torch's stores do.
        """
        return _expect(bytes, self._ask(CompareSetRequest(next(self._ids), key, expected, desired), timeout_seconds))

    def delete(self, key: str, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> bool:
        """Unset a key; returns whether it was set."""
        return _expect(bool, self._ask(DeleteRequest(next(self._ids), key), timeout_seconds))

    def num_keys(self, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> int:
        """Return how many keys are set."""
        return _expect(int, self._ask(CountRequest(next(self._ids)), timeout_seconds))

    def deliver(self, reply: Reply) -> None:
        """Take a reply of the table; one that nobody waits for any more is dropped."""
        with self._lock:
            future = self._open.pop(reply.id, None)
        if future is None:
            return
        if reply.fault:
            future.set_exception(KeyValueError(reply.fault))
        else:
            future.set_result(reply.answer)

    def lose(self, reason: str) -> None:
        """The way to the table is gone: fail every call that waits, and every later one."""
        with self._lock:
            self._lost = reason
            waiting, self._open = self._open, {}
        for future in waiting.values():
            future.set_exception(LinkLost(reason))

    def _ask(self, request: Request, timeout_seconds: float) -> Answer:
        future: Future[Answer] = Future()
        with self._lock:
            if self._lost is not None:
                raise LinkLost(self._lost)
            self._open[request.id] = future
        try:
            self._post(request)
            return future.result(timeout_seconds)
        except TimeoutError:
            self._post(CancelRequest(request.id))
            raise KeyValueTimeoutError(f"{_describe(request)} within {timeout_seconds:g} s") from None
        finally:
            with self._lock:
                self._open.pop(request.id, None)


class KeyValueService:
    """Rank zero's table, served to peers over their control links and to rank zero itself through `client()`.

    Call `attach` with the router of each control link before that starts.
    """

    def __init__(self) -> None:
        self._table = KeyValueTable()
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(Request)

    def attach(self, router: Router) -> None:
        """Serve the peer at the other end of this router's link."""
        router.route(KEY_VALUE_REQUEST, self._receive)
        router.on_end(self._drop)

    def client(self) -> KeyValue:
        """Return rank zero's own client."""
        client: KeyValue = KeyValue(lambda request: self._handle(client, request))
        return client

    def _receive(self, link: Link, payload: memoryview) -> None:
        try:
            request = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"a key-value request cannot be read: {error}") from error
        self._handle(link, request)

    def _drop(self, link: Link, end: LinkEnd) -> None:
        del end
        with self._lock:
            self._table.drop(link)

    def _handle(self, client: KeyValue | Link, request: Request) -> None:
        with self._lock:
            replies = self._table.handle(client, request)
        for reply in replies:
            self._send(reply)

    def _send(self, addressed: Addressed) -> None:
        client, reply = addressed
        if isinstance(client, KeyValue):
            client.deliver(reply)
        elif isinstance(client, Link):
            try:
                client.send(KEY_VALUE_REPLY, msgspec.msgpack.encode(reply))
            except QueueFull as error:
                client.fail(f"does not read its key-value replies: {error}")
            except LinkLost:
                return  # its end listener drops what it waits for


def key_value_over(link: Link, router: Router) -> KeyValue:
    """Return a peer's client over its control link; call before the link starts."""
    client = KeyValue(lambda request: link.send(KEY_VALUE_REQUEST, msgspec.msgpack.encode(request)))
    decoder = msgspec.msgpack.Decoder(Reply)

    def receive(_: Link, payload: memoryview) -> None:
        try:
            reply = decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"a key-value reply cannot be read: {error}") from error
        client.deliver(reply)

    router.route(KEY_VALUE_REPLY, receive)
    router.on_end(lambda _, end: client.lose(end.detail))
    return client


def _expect(kind: type[_T], answer: Answer) -> _T:
    if not isinstance(answer, kind):
        raise RemoteProtocolError(f"the key-value table answered with {type(answer).__name__}, not {kind.__name__}")
    return answer


def _describe(request: Request) -> str:
    match request:
        case GetRequest(key=key):
            return f"key '{key}' was not set"
        case WaitRequest(keys=keys):
            return f"not every key of {', '.join(keys)} was set"
        case _:
            return "rank zero did not answer a key-value request"
