"""The raw side's other end: a process that streams bytes on plain or TLS connections, and does nothing else.

Run as ``python -m flare_cli.bench_pool.raw_service``: reads one JSON line, prints its port, serves until its input
ends. Each connection has memory of its own, as large as what it will move. It is told what to do by a byte (G: send me
some, P: I send some) and a length.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading

from flare_transport.bulk_socket import receive_into, send_all, set_bulk_options
from flare_transport.certificates import Credentials, secure_socket

__all__ = ["ORDER", "main"]

ORDER = struct.Struct("<cQ")
_NEVER = struct.pack("@ll", 0, 0)


def _serve(sock: socket.socket, num_bytes: int) -> None:
    memory = memoryview(bytearray(b"\1") * num_bytes)
    order = bytearray(ORDER.size)
    at = 0
    with sock:
        while True:
            try:
                # It waits between rounds for as long as the other measurement takes.
                sock.settimeout(None)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NEVER)
                receive_into(sock, memoryview(order))
                set_bulk_options(sock)
            except OSError:
                return
            what, length = ORDER.unpack(order)
            at = at if at + length <= num_bytes else 0
            if what == b"G":
                send_all(sock, memory[at : at + length])
            else:
                receive_into(sock, memory[at : at + length])
                send_all(sock, memoryview(b"k"))
            at += length


def main() -> None:
    """See the module."""
    told = json.loads(sys.stdin.readline())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        threading.Thread(target=_accept, args=(listener, told), daemon=True).start()
        sys.stdin.read()


def _accept(listener: socket.socket, told: dict[str, str]) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if told["certificate"]:
            credentials = Credentials(bytes.fromhex(told["certificate"]), bytes.fromhex(told["private_key"]))
            sock = secure_socket(
                sock,
                credentials,
                peer_certificate=bytes.fromhex(told["peer_certificate"]),
                is_server=True,
                timeout_seconds=10.0,
            )
        threading.Thread(target=_serve, args=(sock, int(told["num_bytes"])), daemon=True).start()


if __name__ == "__main__":
    main()
