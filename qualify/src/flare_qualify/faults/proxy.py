"""A TCP proxy in the harness's own process that does to each direction of its connections what a fault says.

Two threads a connection, one for each direction. Knows no frame: what passes is bytes, encrypted or not.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flare_qualify.faults.line_faults import Close, Effect, Hold, Line, LineFault, Pause, Send

__all__ = ["Direction", "FaultProxy", "Firing"]

_CHUNK_BYTES = 1 << 16
_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 0.2
"""A thread that waits for a socket looks this often whether its connection was cut."""
_LINGER_NOT = struct.pack("ii", 1, 0)

Address = tuple[str, int]


class Direction(enum.StrEnum):
    """Which way bytes go: from whoever connected to the proxy, or to it."""

    FROM_CALLER = "from the caller"
    TO_CALLER = "to the caller"


@dataclass(frozen=True, slots=True)
class Firing:
    """A fault that fired: on which route, which way, what it did, and when (``time.monotonic``)."""

    route: str
    direction: Direction
    what: str
    at: float


@dataclass(slots=True, eq=False)
class _Connection:
    """A caller's connection and the one made for it. Fields change under the proxy's condition only."""

    route: str
    caller: socket.socket
    target: socket.socket
    lines: dict[Direction, Line]
    num_pumps: int = 2
    cut: Close | None = None

    def ends(self, direction: Direction) -> tuple[socket.socket, socket.socket]:
        """Where this direction's bytes come from, and where they go."""
        if direction is Direction.FROM_CALLER:
            return self.caller, self.target
        return self.target, self.caller


@dataclass(frozen=True, slots=True)
class _Route:
    listener: socket.socket
    target: Address
    before_answer: Callable[[], None]


class _CutError(Exception):
    """The connection was cut while one of its threads waited."""


class FaultProxy:
    """Routes by name; use as a context manager. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._listeners: list[socket.socket] = []
        self._armed: dict[tuple[str, Direction], LineFault] = {}
        self._connections: list[_Connection] = []
        self._threads: list[threading.Thread] = []
        self._firings: list[Firing] = []
        self._is_closed = False

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_route(
        self, name: str, listener: socket.socket, target: Address, *, before_answer: Callable[[], None] = lambda: None
    ) -> None:
        """Carry every connection that ``listener`` (owned from now on) takes to ``target``, dialled from here.

        Several listeners may share a name: faults are armed by it. ``before_answer`` is called before bytes of the
        target are passed on to a caller.
        """
        route = _Route(listener, target, before_answer)
        with self._changed:
            self._listeners.append(listener)
        self._spawn(lambda: self._accept(name, route), f"accept {name}")

    def arm(self, name: str, direction: Direction, fault: LineFault) -> None:
        """From now on ``fault`` applies to this direction of the route's connections, present and future."""
        with self._changed:
            self._armed[name, direction] = fault
            for connection in self._of(name):
                connection.lines[direction].arm(fault)
            self._changed.notify_all()

    def heal(self, name: str) -> None:
        """Take the route's faults away; what was held back passes."""
        with self._changed:
            for direction in Direction:
                self._armed.pop((name, direction), None)
            for connection in self._of(name):
                for line in connection.lines.values():
                    line.arm(None)
            self._changed.notify_all()

    def num_connections(self, name: str) -> int:
        """Connections of the route that are open."""
        with self._changed:
            return len(self._of(name))

    def wait_connected(self, name: str, *, timeout: float) -> bool:
        """Block until the route carries a connection; whether it did within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._of(name)), timeout)

    def wait_fired(self, *, timeout: float) -> list[Firing]:
        """Block until some fault has fired, or ``timeout`` seconds have passed; what has fired so far."""
        with self._changed:
            self._changed.wait_for(lambda: self._firings, timeout)
            return list(self._firings)

    def close(self) -> None:
        """End every connection and listener, and wait for the threads. Idempotent."""
        with self._changed:
            self._is_closed = True
            for connection in self._connections:
                self._cut(connection, Close.RESET)
            self._changed.notify_all()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in list(self._threads):
            thread.join()

    def _of(self, name: str) -> list[_Connection]:
        return [connection for connection in self._connections if connection.route == name]

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=f"proxy {name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, name: str, route: _Route) -> None:
        while True:
            try:
                caller, _ = route.listener.accept()
            except OSError:  # closed
                return
            try:
                target = socket.create_connection(route.target, _CONNECT_SECONDS)
            except OSError:  # nobody listens there: the caller sees its connection end
                caller.close()
                continue
            self._join(name, route, caller, target)

    def _join(self, name: str, route: _Route, caller: socket.socket, target: socket.socket) -> None:
        for sock in (caller, target):
            sock.settimeout(_LOOK_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            lines = {direction: Line(self._armed.get((name, direction))) for direction in Direction}
            connection = _Connection(name, caller, target, lines)
            self._connections.append(connection)
            if self._is_closed:
                self._cut(connection, Close.RESET)
            self._changed.notify_all()
        for direction in Direction:
            self._spawn(partial(self._pump, connection, direction, route.before_answer), name)

    def _pump(self, connection: _Connection, direction: Direction, before_answer: Callable[[], None]) -> None:
        source, sink = connection.ends(direction)
        try:
            while data := self._receive(connection, source):
                if direction is Direction.TO_CALLER:
                    before_answer()
                self._carry(connection, direction, data)
            self._finish(connection, direction, sink)
        except (_CutError, OSError):  # one side is gone, or the connection was cut: so is the other
            with self._changed:
                self._cut(connection, Close.RESET)
        with self._changed:
            connection.num_pumps -= 1
            if not connection.num_pumps:
                self._connections.remove(connection)
                connection.caller.close()
                connection.target.close()

    def _receive(self, connection: _Connection, source: socket.socket) -> bytes:
        while True:
            with contextlib.suppress(TimeoutError):
                data = source.recv(_CHUNK_BYTES)
                if connection.cut is not None:
                    raise _CutError
                return data
            if connection.cut is not None:
                raise _CutError

    def _send(self, connection: _Connection, sink: socket.socket, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if connection.cut is not None:
                raise _CutError
            with contextlib.suppress(TimeoutError):
                view = view[sink.send(view) :]

    def _carry(self, connection: _Connection, direction: Direction, data: bytes) -> None:
        line = connection.lines[direction]
        with self._changed:
            held, num_fired = (line.release() if line.fault is None else b""), len(line.fired)
            effects, fault = line.carry(held + data), line.fault
            self._note(connection, direction, num_fired)
        self._perform(connection, direction, effects, fault)

    def _finish(self, connection: _Connection, direction: Direction, sink: socket.socket) -> None:
        line = connection.lines[direction]
        with self._changed:
            num_fired = len(line.fired)
            kept = line.release()
            effects, fault = [*([Send(kept)] if kept else []), *line.finish()], line.fault
            self._note(connection, direction, num_fired)
        self._perform(connection, direction, effects, fault)
        sink.shutdown(socket.SHUT_WR)

    def _note(self, connection: _Connection, direction: Direction, num_known: int) -> None:
        fired = connection.lines[direction].fired[num_known:]
        self._firings += [Firing(connection.route, direction, what, time.monotonic()) for what in fired]
        if fired:
            self._changed.notify_all()

    def _perform(
        self, connection: _Connection, direction: Direction, effects: list[Effect], fault: LineFault | None
    ) -> None:
        """Carry out what ``fault`` wants."""
        _, sink = connection.ends(direction)
        for effect in effects:
            match effect:
                case Send(data):
                    self._send(connection, sink, data)
                case Pause(seconds):
                    with self._changed:
                        self._changed.wait_for(lambda: connection.cut is not None, seconds)
                case Hold():
                    self._hold(connection, connection.lines[direction], fault)
                case Close():
                    with self._changed:
                        self._cut(connection, effect)
                    raise _CutError

    def _hold(self, connection: _Connection, line: Line, fault: LineFault | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: connection.cut is not None or line.fault is not fault)

    def _cut(self, connection: _Connection, how: Close) -> None:
        """End both connections; the first verdict counts. Expects the condition to be held."""
        if connection.cut is not None:
            return
        connection.cut = how
        for sock in (connection.caller, connection.target):
            with contextlib.suppress(OSError):
                if how is Close.RESET:
                    # Nothing is sent now: the reset goes out when the last thread closes the socket.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
                    sock.shutdown(socket.SHUT_RD)
                else:
                    sock.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()
