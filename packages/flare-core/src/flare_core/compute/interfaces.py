"""The network interface that has an address: NCCL is told names, not addresses. Linux only; knows nothing of ranks."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

__all__ = ["interface_of"]

_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B
_IF_INET6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """The interface whose own address, or whose loopback network, ``address`` belongs to; None where none is found.

    A second IPv4 address of an interface is not found.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address):
        return _with_ipv6(wanted)
    for _, name in socket.if_nameindex():
        own = _ask(name, _SIOCGIFADDR)
        if own is None:
            continue
        mask = _ask(name, _SIOCGIFNETMASK)
        is_here = own == wanted
        if own.is_loopback and mask:
            is_here = wanted in ipaddress.ip_network(f"{own}/{mask}", strict=False)
        if is_here:
            return name
    return None


def _ask(interface: str, request: int) -> ipaddress.IPv4Address | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, request, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return ipaddress.IPv4Address(answer[20:24])


def _with_ipv6(wanted: ipaddress.IPv6Address) -> str | None:
    if not _IF_INET6.exists():
        return None
    for line in _IF_INET6.read_text().splitlines():
        digits, *_, name = line.split()
        if bytes.fromhex(digits) == wanted.packed:
            return name
    return None
