"""A connected byte stream that never blocks, plain or TLS, and the socket options of flare's links.

Knows neither frames nor threads: `Link` serialises its calls, because an SSL object allows one call at a time.
"""

import socket
from typing import TYPE_CHECKING, Protocol, cast

from flare_transport.framing import Buffer

__all__ = ["USER_TIMEOUT_MILLISECONDS", "Channel", "PlainChannel", "TlsChannel", "open_channel", "set_link_options"]

if TYPE_CHECKING:
    import ssl

# The kernel gives up on a peer that acknowledges nothing, or reads nothing, for as long as heartbeats would.
USER_TIMEOUT_MILLISECONDS = 5_000
_KEEPALIVE_SECONDS = 2


class Channel(Protocol):
    """One end of a connection. Every call returns at once."""

    def fileno(self) -> int:
        """The descriptor to poll."""

    def receive(self, num_bytes: int) -> bytes | None:
        """Return up to `num_bytes`, `b""` at the end of the stream, None if none have come; raises `OSError`."""

    def send(self, data: Buffer) -> int:
        """Return how many bytes were taken, 0 if none can be (then offer the same bytes again); raises `OSError`."""

    def has_pending(self) -> bool:
        """Whether bytes wait in the channel itself, where polling the descriptor would not show them."""

    def close(self) -> None:
        """Close the connection; idempotent."""


class PlainChannel:
    """A socket as it is."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self, num_bytes: int) -> bytes | None:
        try:
            return self._socket.recv(num_bytes)
        except BlockingIOError:
            return None

    def send(self, data: Buffer) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def has_pending(self) -> bool:
        return False

    def close(self) -> None:
        self._socket.close()


class TlsChannel:
    """A socket whose TLS handshake is done (an `ssl.SSLSocket`)."""

    def __init__(self, sock: "ssl.SSLSocket") -> None:
        import ssl

        self._socket = sock
        self._not_now = (ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self, num_bytes: int) -> bytes | None:
        try:
            return self._socket.recv(num_bytes)
        except self._not_now:
            return None

    def send(self, data: Buffer) -> int:
        try:
            return self._socket.send(data)
        except self._not_now:
            return 0

    def has_pending(self) -> bool:
        return self._socket.pending() > 0

    def close(self) -> None:
        self._socket.close()


def open_channel(sock: socket.socket) -> Channel:
    """Make a connected socket, plain or TLS, into a channel that owns it."""
    sock.setblocking(False)
    if hasattr(sock, "getpeercert"):  # asked this way so that plaintext processes need not load `ssl`
        return TlsChannel(cast("ssl.SSLSocket", sock))
    return PlainChannel(sock)


def set_link_options(sock: socket.socket) -> None:
    """Set what every TCP connection of flare has: no delay, keep-alive, and a bound on unacknowledged data."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MILLISECONDS)
