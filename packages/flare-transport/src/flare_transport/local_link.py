"""A link between two processes of one host over an inherited socket pair: no handshake, nobody else can reach it."""

import socket

from flare_transport.errors import LocalProtocolError
from flare_transport.link import Link, LinkSettings

__all__ = ["local_link"]


def local_link(sock: socket.socket, *, name: str = "local link", settings: LinkSettings | None = None) -> Link:
    """Return a link over one end of `socket.socketpair()`, which it then owns; raises `LocalProtocolError` otherwise.

    For an inherited descriptor pass `socket.socket(fileno=descriptor)`.
    """
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        raise LocalProtocolError(f"{name}: a local link needs one end of a Unix stream socket pair")
    return Link(sock, name=name, settings=settings)
