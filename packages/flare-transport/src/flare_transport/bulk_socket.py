"""Bulk transfers on a blocking socket, plain or TLS: units, answers and payloads, with a limit on silence.

A transfer that makes no progress for `STALL_SECONDS`, or passes its deadline, raises `TimeoutError`. Knows no session.
"""

import socket
import time

from flare_transport.bulk_unit import ANSWER_BYTES, UNIT_BYTES, BulkUnit, UnitAnswer
from flare_transport.timed_socket import ConnectionCutError

__all__ = ["STALL_SECONDS", "receive_answer", "receive_into", "receive_unit", "send_all"]

STALL_SECONDS = 2.0
_SEND_BYTES = 1 << 20


def _arm(sock: socket.socket, deadline: float | None) -> None:
    remaining = STALL_SECONDS if deadline is None else min(STALL_SECONDS, deadline - time.monotonic())
    if remaining <= 0:
        raise TimeoutError("the transfer's time is up")
    sock.settimeout(remaining)


def send_all(sock: socket.socket, data: memoryview, *, deadline: float | None = None) -> None:
    """Send all of `data`, in pieces, so that slow is told from stalled. Raises `OSError`."""
    at = 0
    while at < len(data):
        _arm(sock, deadline)
        at += sock.send(data[at : at + _SEND_BYTES])


def receive_into(sock: socket.socket, view: memoryview, *, deadline: float | None = None) -> None:
    """Fill `view`. Raises `OSError`; `ConnectionCutError` at the end of the stream."""
    at = 0
    while at < len(view):
        _arm(sock, deadline)
        got = sock.recv_into(view[at:])
        if not got:
            raise ConnectionCutError("the other side closed the connection")
        at += got


def receive_unit(sock: socket.socket, *, idle_seconds: float | None) -> BulkUnit | None:
    """The next unit, waiting up to `idle_seconds` for it to begin; None at the end of the stream between units.

    Raises `OSError` and `RemoteProtocolError`.
    """
    sock.settimeout(idle_seconds)
    data = bytearray(UNIT_BYTES)
    got = sock.recv_into(data)
    if not got:
        return None
    receive_into(sock, memoryview(data)[got:])
    return BulkUnit.decode(memoryview(data))


def receive_answer(sock: socket.socket, *, deadline: float | None = None) -> UnitAnswer:
    """A unit's answer. Raises `OSError` and `RemoteProtocolError`."""
    data = bytearray(ANSWER_BYTES)
    receive_into(sock, memoryview(data), deadline=deadline)
    return UnitAnswer.decode(memoryview(data))
