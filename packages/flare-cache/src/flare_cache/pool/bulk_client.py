"""Bulk connections of one pool session, lent to one thread at a time, and ranges moved over them.

A connection on which anything went wrong is closed: a new one costs a handshake, a stream that lost its place costs
everything. Over TCP a cancelled transfer's buffer is always quiet: its thread has left the system call.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from flare_cache.pool.client import PoolClient, PoolUnavailable
from flare_cache.pool.staging import BufferState
from flare_transport import BulkUnit, RemoteProtocolError, UnitOp, UnitStatus
from flare_transport.bulk_socket import receive_answer, receive_into, send_all

__all__ = ["BulkConnections", "TcpRange"]


@dataclass(slots=True)
class BulkConnections:
    """At most ``limit`` connections of ``client``. Thread-safe; each is lent for one range."""

    client: PoolClient
    limit: int
    _idle: list[socket.socket] = field(default_factory=list)
    _lent: set[socket.socket] = field(default_factory=set)
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False
    _places: threading.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = threading.Semaphore(self.limit)

    @contextlib.contextmanager
    def lend(self, deadline: float) -> Iterator[TcpRange]:
        """A connection for one range, closed when the body raises. Blocks while all are lent, then PoolUnavailable."""
        if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PoolUnavailable("no bulk connection was free in the job's time")
        try:
            with self._lend_one(deadline) as line:
                yield line
        finally:
            self._places.release()

    @contextlib.contextmanager
    def _lend_one(self, deadline: float) -> Iterator[TcpRange]:
        with self._mutex:
            sock = self._idle.pop() if self._idle else None
        if sock is None:
            sock = self.client.open_bulk(timeout_seconds=max(0.1, min(2.0, deadline - time.monotonic())))
        is_whole = False
        try:
            self._lend(sock)
            yield TcpRange(sock, deadline)
            is_whole = True
        finally:
            self._take_back(sock, is_whole=is_whole)

    def close(self) -> None:
        """Close what is idle, and cut what is lent: the threads that use it fail at once."""
        with self._mutex:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for sock in self._lent:
                with contextlib.suppress(OSError):
                    # Not the TLS socket's own shutdown, which would leave its reader without TLS.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
        for sock in idle:
            sock.close()

    def _lend(self, sock: socket.socket) -> None:
        with self._mutex:
            if not self._is_closed:
                self._lent.add(sock)
                return
        raise PoolUnavailable("the pool's session has ended")

    def _take_back(self, sock: socket.socket, *, is_whole: bool) -> None:
        with self._mutex:
            self._lent.discard(sock)
            if is_whole and not self._is_closed:
                self._idle.append(sock)
                return
        sock.close()


@dataclass(frozen=True, slots=True)
class TcpRange:
    """One range of one transfer on a plain or TLS connection."""

    sock: socket.socket
    deadline: float

    def begin_get(self, key: bytes, transfer: bytes, *, offset: int, num_bytes: int) -> None:
        """Ask for ``num_bytes`` from ``offset`` on; :meth:`receive` has all of them then, in order.

        Raises:
            OSError: the connection, the time limit, or the manager's refusal.
        """
        unit = BulkUnit.make(key, UnitOp.GET, transfer, offset=offset, length=num_bytes)
        send_all(self.sock, memoryview(unit.encode()), deadline=self.deadline)
        self._expect(num_bytes)

    def receive(self, view: memoryview) -> None:
        """Fill ``view``, staging, with the next bytes of what was asked for. Raises as :meth:`begin_get`."""
        receive_into(self.sock, view, deadline=self.deadline)

    def put(self, key: bytes, transfer: bytes, *, offset: int, view: memoryview) -> None:
        """Send ``view`` as the bytes from ``offset`` on; then the manager has them. Raises as :meth:`begin_get`."""
        unit = BulkUnit.make(key, UnitOp.PUT, transfer, offset=offset, length=len(view))
        send_all(self.sock, memoryview(unit.encode()), deadline=self.deadline)
        send_all(self.sock, view, deadline=self.deadline)
        self._expect(0)

    def _expect(self, num_bytes: int) -> None:
        try:
            answer = receive_answer(self.sock, deadline=self.deadline)
        except RemoteProtocolError as error:
            raise PoolUnavailable(str(error)) from error
        if answer.status is not UnitStatus.OK or answer.length != num_bytes:
            raise PoolUnavailable(f"the pool's manager answers a range with {answer.status.name.lower()}")

    def cancel(self) -> BufferState:
        """Give the range up; says whether anything may still write to its buffer."""
        self.sock.close()
        return BufferState.QUIET
