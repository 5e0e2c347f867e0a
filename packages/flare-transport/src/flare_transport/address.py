"""Addresses of a listener: parsing, resolving, binding to exactly one. Knows no protocol."""

import ipaddress
import socket
from dataclasses import dataclass

from flare_transport.errors import AddressError

__all__ = ["Address", "listen_on", "parse_address", "resolve"]

_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name, IPv4 or IPv6 address without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse `host:port` or `[v6 address]:port`; raises `AddressError`."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host and not bracketed):
        raise AddressError(f"'{text}' is not an address: give host:port, or [address]:port for IPv6")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise AddressError(f"'{text}' has no valid port: '{port}' is not a number from 1 to 65535")
    return Address(host, int(port))


def listen_on(address: Address) -> socket.socket:
    """Listen on exactly this address (port 0: any free one); raises `AddressError`, also for a wildcard.

    A wildcard address would be reachable from every network of the host.
    """
    family, sockaddr = resolve(address)[0]
    if ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]).is_unspecified:
        raise AddressError(
            f"{address} is every interface; give the one address at which the other ranks reach this host"
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(sockaddr)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise AddressError(f"cannot listen on {address}: {error.strerror}") from error
    return sock


def resolve(address: Address) -> list[tuple[int, tuple[object, ...]]]:
    """Return socket family and socket address of each meaning of `address`, at least one; raises `AddressError`."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"cannot resolve {address}: {error}") from error
    return [(int(family), tuple(sockaddr)) for family, _, _, _, sockaddr in found]
