"""What a process shows to the network, for tests of what it should not: its listening sockets, and loopback's traffic.

Linux only. Knows nothing of flare's ports.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["listening", "loopback_traffic"]

_ALL_PROTOCOLS = 0x0003
_SO_ATTACH_FILTER = 26
_POLL_SECONDS = 0.1
_LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of the TCP sockets on which the process of this id listens."""
    own: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            own.add(str(descriptor.readlink()))
    found: set[tuple[str, int]] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in own:
                host, port = fields[1].split(":")
                found.add((_address(host), int(port, 16)))
    return found


def _address(digits: str) -> str:
    """The kernel writes an address as hexadecimal words in the host's byte order."""
    raw = bytes.fromhex(digits)
    return str(ipaddress.ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))))


@contextmanager
def loopback_traffic(address: str) -> Iterator[bytearray]:
    """Every frame that crosses loopback from or to this IPv4 address until the end; complete when the block has ended.

    Needs root. Raises PermissionError without.
    """
    seen = bytearray()
    over = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
        # Other processes talk on loopback too: the kernel sorts them out.
        _attach_filter(tap, int(ipaddress.IPv4Address(address)))
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        tap.bind(("lo", 0))
        tap.settimeout(_POLL_SECONDS)

        def listen() -> None:
            while True:
                try:
                    seen.extend(tap.recv(1 << 17))
                except TimeoutError:
                    if over.is_set():
                        return

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            yield seen
        finally:
            over.set()
            listener.join()


def _attach_filter(tap: socket.socket, address: int) -> None:
    """A classic BPF program: frames of Ethernet and IPv4 whose source (at 26) or destination (at 30) is the address."""
    load, is_equal, give = 0x20, 0x15, 0x06
    program = (
        (load, 0, 0, 26),
        (is_equal, 2, 0, address),
        (load, 0, 0, 30),
        (is_equal, 0, 1, address),
        (give, 0, 0, 1 << 18),
        (give, 0, 0, 0),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = struct.pack("HL", len(program), ctypes.addressof(code))
    tap.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)
