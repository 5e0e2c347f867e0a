"""Accepting connections from strangers. Owns who may wait, for how long, and who must go; knows no handshake.

Each connection is greeted in a thread of its own against a short deadline. At most `max_pending` wait at once. When
there is no room, the connection that has shown least goes, and the oldest among those, from the source that holds most:
so silent or slow strangers never keep the right peer out, whatever their number.
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flare_transport.channel import set_link_options

__all__ = ["Caller", "Greeter", "GreetingSettings", "Reception"]

_LOG = logging.getLogger(__name__)
_ACCEPTS_PER_TURN = 64


@dataclass(frozen=True, slots=True)
class GreetingSettings:
    """Bounds on connections that have not proven anything yet."""

    deadline_seconds: float = 3.0
    max_pending: int = 64
    max_pending_per_source: int = 16


class Caller:
    """One connection being greeted. The greeter raises `progress` as the other side shows more of what it should."""

    def __init__(self, sock: socket.socket, source: str, listener_index: int, deadline: float) -> None:
        self.socket = sock
        self.source = source
        self.listener_index = listener_index
        self.deadline = deadline
        self.progress = 0
        self._lock = threading.Lock()
        self._is_settled = False
        # TLS takes the descriptor away from `socket`; this one reaches the connection whoever holds it.
        self._handle = sock.dup()

    def keep(self) -> bool:
        """The greeter has what it wants: from now on nobody sends this caller away; returns False if someone has."""
        with self._lock:
            was_settled, self._is_settled = self._is_settled, True
        return not was_settled

    def send_away(self) -> None:
        """Cut the connection unless it is kept; its greeter wakes and finds it closed."""
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
            with contextlib.suppress(OSError):  # it is gone already
                self._handle.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """The greeter is done with it: nobody sends it away any more."""
        with self._lock:
            self._is_settled = True
            self._handle.close()


Greeter = Callable[[Caller], None]


class Reception:
    """Accepts on `listeners` and runs `greet(caller)` for each connection in a daemon thread.

    `greet` owns the caller's socket and must not raise for what a stranger does. Used by one thread. `close` does not
    close the listeners.
    """

    def __init__(self, listeners: Sequence[socket.socket], greet: Greeter, settings: GreetingSettings) -> None:
        self._listeners = {listener.fileno(): (index, listener) for index, listener in enumerate(listeners)}
        self._greet = greet
        self._settings = settings
        self._lock = threading.Lock()
        self._pending: list[Caller] = []
        self._poller = select.poll()
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._poller.register(self._wake_descriptor, select.POLLIN)
        for listener in listeners:
            listener.setblocking(False)
            self._poller.register(listener.fileno(), select.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Have `turn` report this connected descriptor once the other side closes it."""
        self._poller.register(descriptor, select.POLLRDHUP)

    def forget(self, descriptor: int) -> None:
        """Undo `watch`."""
        self._poller.unregister(descriptor)

    def turn(self, timeout_seconds: float) -> list[int]:
        """Accept what has come, or wait for it, for the end of a greeting, or for the end of a watched connection.

        Returns the watched descriptors whose other side has closed.
        """
        ended = []
        for descriptor, _ in self._poller.poll(max(0.0, timeout_seconds) * 1000):
            if descriptor in self._listeners:
                self._accept_all(*self._listeners[descriptor])
            elif descriptor == self._wake_descriptor:
                os.eventfd_read(descriptor)
            else:
                ended.append(descriptor)
        return ended

    def close(self) -> None:
        """Send everyone away who is still being greeted. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._wake_descriptor)
            pending = list(self._pending)
        for caller in pending:
            caller.send_away()

    def _accept_all(self, index: int, listener: socket.socket) -> None:
        """Take what waits, so that a flood does not fill the kernel's queue, where the right peer would wait too."""
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, sockaddr = listener.accept()
            except OSError:  # nobody waits, or descriptors ran out
                return
            self._receive(index, sock, sockaddr)

    def _receive(self, index: int, sock: socket.socket, sockaddr: tuple[object, ...]) -> None:
        try:
            set_link_options(sock)
            caller = Caller(sock, str(sockaddr[0]), index, time.monotonic() + self._settings.deadline_seconds)
        except OSError:  # it went away while it waited, or descriptors ran out
            sock.close()
            return
        with self._lock:
            self._make_room(caller.source)
            self._pending.append(caller)
        threading.Thread(target=self._serve, args=(caller,), name="flare greeting", daemon=True).start()

    def _make_room(self, source: str) -> None:
        per_source = Counter(caller.source for caller in self._pending)
        if per_source[source] >= self._settings.max_pending_per_source:
            crowded = source
        elif len(self._pending) >= self._settings.max_pending:
            crowded = per_source.most_common(1)[0][0]
        else:
            return
        # `min` takes the first of equals, and callers stand in the order in which they came.
        leaving = min((c for c in self._pending if c.source == crowded), key=lambda c: c.progress)
        self._pending.remove(leaving)
        leaving.send_away()

    def _serve(self, caller: Caller) -> None:
        try:
            self._greet(caller)
        except Exception:  # noqa: BLE001  one caller's thread; the others and the listener go on
            _LOG.exception("greeting a connection from %s failed", caller.source)
            caller.socket.close()
        caller.release()
        with self._lock:
            if caller in self._pending:
                self._pending.remove(caller)
            if not self._is_closed:
                os.eventfd_write(self._wake_descriptor, 1)
