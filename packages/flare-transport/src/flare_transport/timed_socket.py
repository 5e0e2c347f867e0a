"""Blocking exchanges on a socket against one deadline for all of them, for threads that run a handshake.

Knows no frame: how many bytes to read is asked of whoever decodes them, so that none of what follows is taken.
"""

import socket
import time

from flare_transport.framing import Buffer

__all__ = ["ConnectionCutError", "TimedSocket"]


class ConnectionCutError(ConnectionError):
    """The other side closed the connection in the middle of an exchange."""


class TimedSocket:
    """A connected socket and an absolute deadline (`time.monotonic`). Raises `TimeoutError` once that has passed."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.socket = sock
        self._deadline = deadline

    def remaining_seconds(self) -> float:
        """The time left, more than zero; raises `TimeoutError`."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        return remaining

    def send(self, data: Buffer) -> None:
        """Send all of `data`."""
        if data:
            self.socket.settimeout(self.remaining_seconds())
            self.socket.sendall(data)

    def await_first(self) -> None:
        """Wait for a byte and leave it there; raises `ConnectionCutError` at the end."""
        self.socket.settimeout(self.remaining_seconds())
        if not self.socket.recv(1, socket.MSG_PEEK):
            raise ConnectionCutError("the other side closed the connection")

    def receive(self, max_bytes: int) -> bytes:
        """Wait for at least one byte and return at most `max_bytes`; raises `ConnectionCutError` at the end."""
        self.socket.settimeout(self.remaining_seconds())
        data = self.socket.recv(max_bytes)
        if not data:
            raise ConnectionCutError("the other side closed the connection")
        return data
