"""Bulk transfers on a connected socket, plain or TLS: units, answers and payloads, with a limit on silence.

A transfer that makes no progress for `STALL_SECONDS`, or passes its deadline, raises `TimeoutError`. A plain socket
blocks in the kernel, which keeps the time (SO_RCVTIMEO, SO_SNDTIMEO) and comes back once for a whole piece; TLS is
asked again and again. Knows no session.
"""

import socket
import struct
import time

from flare_transport.bulk_unit import ANSWER_BYTES, UNIT_BYTES, BulkUnit, UnitAnswer
from flare_transport.timed_socket import ConnectionCutError

__all__ = ["STALL_SECONDS", "receive_answer", "receive_into", "receive_unit", "send_all", "set_bulk_options"]

STALL_SECONDS = 2.0
_TLS_SEND_BYTES = 1 << 20
_PLAIN_BYTES = 8 << 20
_TIMEVAL = struct.Struct("@ll")


def set_bulk_options(sock: socket.socket) -> socket.socket:
    """Make a connected socket ready for the functions below, and return it."""
    if _is_tls(sock):
        sock.settimeout(STALL_SECONDS)
        return sock
    sock.settimeout(None)
    _keep_time(sock, STALL_SECONDS)
    return sock


def send_all(sock: socket.socket, data: memoryview, *, deadline: float | None = None) -> None:
    """Send all of `data`. Raises `OSError`."""
    step = _TLS_SEND_BYTES if _is_tls(sock) else _PLAIN_BYTES
    at = 0
    while at < len(data):
        _check(deadline)
        try:
            at += sock.send(data[at : at + step])
        except BlockingIOError as error:
            raise _stalled() from error


def receive_into(sock: socket.socket, view: memoryview, *, deadline: float | None = None) -> None:
    """Fill `view`. Raises `OSError`; `ConnectionCutError` at the end of the stream."""
    flags = 0 if _is_tls(sock) else socket.MSG_WAITALL
    at = 0
    while at < len(view):
        _check(deadline)
        try:
            got = sock.recv_into(view[at : at + _PLAIN_BYTES], 0, flags)
        except BlockingIOError as error:
            raise _stalled() from error
        if not got:
            raise ConnectionCutError("the other side closed the connection")
        at += got


def receive_unit(sock: socket.socket) -> BulkUnit | None:
    """The next unit, waiting for it to begin as long as it takes; None at the end of the stream between units.

    Raises `OSError` and `RemoteProtocolError`.
    """
    data = bytearray(UNIT_BYTES)
    _wait_for_ever(sock)
    try:
        got = sock.recv_into(data)
    finally:
        set_bulk_options(sock)
    if not got:
        return None
    receive_into(sock, memoryview(data)[got:])
    return BulkUnit.decode(memoryview(data))


def receive_answer(sock: socket.socket, *, deadline: float | None = None) -> UnitAnswer:
    """A unit's answer. Raises `OSError` and `RemoteProtocolError`."""
    data = bytearray(ANSWER_BYTES)
    receive_into(sock, memoryview(data), deadline=deadline)
    return UnitAnswer.decode(memoryview(data))


def _is_tls(sock: socket.socket) -> bool:
    return hasattr(sock, "getpeercert")


def _keep_time(sock: socket.socket, seconds: float) -> None:
    value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _wait_for_ever(sock: socket.socket) -> None:
    if _is_tls(sock):
        sock.settimeout(None)
    else:
        _keep_time(sock, 0.0)


def _check(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeoutError("the transfer's time is up")


def _stalled() -> TimeoutError:
    return TimeoutError(f"no progress for {STALL_SECONDS:g} s")
