"""Limits of the machine, measured beside the pool: bytes over sockets between two processes, and over the disk."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flare_cache.host_memory import aligned_buffer
from flare_cli.bench_pool.raw_service import ORDER
from flare_transport import Security
from flare_transport.bulk_socket import receive_into, send_all, set_bulk_options
from flare_transport.certificates import make_credentials, secure_socket

__all__ = ["RawSockets", "open_raw_sockets", "raw_disk_read", "raw_disk_write", "touched_memory"]

UNIT_BYTES = 8 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RawSockets:
    """Connections to another process that only moves bytes: from its memory to this one's, and back."""

    sockets: Sequence[socket.socket]
    buffers: Sequence[memoryview]

    def get(self, num_bytes: int) -> float:
        """Seconds to receive ``num_bytes`` over all connections together."""
        return self._beside(num_bytes, self._get_one)

    def put(self, num_bytes: int) -> float:
        """Seconds to send ``num_bytes``, until the other side has them."""
        return self._beside(num_bytes, self._put_one)

    def _beside(self, num_bytes: int, move: Callable[[socket.socket, memoryview, int], None]) -> float:
        share = num_bytes // len(self.sockets)
        return run_beside(
            [lambda s=s, b=b: move(s, b, share) for s, b in zip(self.sockets, self.buffers, strict=True)]  # type: ignore[misc]
        )

    @staticmethod
    def _get_one(sock: socket.socket, buffer: memoryview, num_bytes: int) -> None:
        for at in range(0, num_bytes, UNIT_BYTES):
            length = min(UNIT_BYTES, num_bytes - at)
            send_all(sock, memoryview(ORDER.pack(b"G", length)))
            receive_into(sock, buffer[at : at + length])

    @staticmethod
    def _put_one(sock: socket.socket, buffer: memoryview, num_bytes: int) -> None:
        for at in range(0, num_bytes, UNIT_BYTES):
            length = min(UNIT_BYTES, num_bytes - at)
            send_all(sock, memoryview(ORDER.pack(b"P", length)))
            send_all(sock, buffer[at : at + length])
            receive_into(sock, memoryview(bytearray(1)))


@contextlib.contextmanager
def open_raw_sockets(security: Security, num_connections: int, num_bytes: int) -> Iterator[RawSockets]:
    """Start the other process and connect; ends it afterwards."""
    ours, theirs = (make_credentials(), make_credentials()) if security is Security.TLS else (None, None)
    told = {
        "num_bytes": num_bytes // num_connections,
        "certificate": theirs.certificate.hex() if theirs else "",
        "private_key": theirs.private_key.hex() if theirs else "",
        "peer_certificate": ours.certificate.hex() if ours else "",
    }
    command = [sys.executable, "-m", "flare_cli.bench_pool.raw_service"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None  # noqa: S101 - pipes were asked for
        assert process.stdout is not None  # noqa: S101
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        port = int(process.stdout.readline())
        sockets: list[socket.socket] = []
        try:
            for _ in range(num_connections):
                sock = socket.create_connection(("127.0.0.1", port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if ours is not None and theirs is not None:
                    sock = secure_socket(
                        sock, ours, peer_certificate=theirs.certificate, is_server=False, timeout_seconds=10.0
                    )
                sockets.append(set_bulk_options(sock))
            yield RawSockets(sockets, [touched_memory(num_bytes // num_connections) for _ in sockets])
        finally:
            for sock in sockets:
                sock.close()
            process.stdin.close()


def touched_memory(num_bytes: int) -> memoryview:
    """Memory that has been written to: its pages are there."""
    buffer = aligned_buffer(num_bytes)
    buffer[:] = bytes(num_bytes)
    return buffer


def raw_disk_write(directory: Path, data: memoryview, *, num_files: int, direct: bool, num_threads: int) -> float:
    """Seconds to write ``data`` as files of equal size, synced, as many at a time as there are threads; they stay.

    All of the memory is different: a device that is given the same few megabytes again and again is a third faster.
    """
    size = len(data) // num_files

    def write(number: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        fd = os.open(directory / f"raw.{number}", flags, 0o600)
        own = data[number * size : (number + 1) * size]
        try:
            os.posix_fallocate(fd, 0, size)
            for at in range(0, size, UNIT_BYTES):
                os.pwritev(fd, [own[at : at + UNIT_BYTES]], at)
            os.fsync(fd)
        finally:
            os.close(fd)

    return _share(range(num_files), write, num_threads)


def raw_disk_read(paths: Sequence[Path], target: memoryview, *, num_threads: int) -> float:
    """Seconds to read whole files into ``target``, buffered, in pieces of 8 MiB that threads take in turns."""
    sizes = [path.stat().st_size for path in paths]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    pieces = [
        (path, at, start + at, min(UNIT_BYTES, size - at))
        for path, size, start in zip(paths, sizes, starts, strict=True)
        for at in range(0, size, UNIT_BYTES)
    ]

    def read(piece: tuple[Path, int, int, int]) -> None:
        path, at, goal, length = piece
        fd = os.open(path, os.O_RDONLY)
        try:
            os.preadv(fd, [target[goal : goal + length]], at)
        finally:
            os.close(fd)

    return _share(pieces, read, num_threads)


def _share(tasks: Iterable[_T], work: Callable[[_T], None], num_threads: int) -> float:
    with ThreadPoolExecutor(num_threads) as threads:
        start = time.perf_counter()
        list(threads.map(work, tasks))
        return time.perf_counter() - start


def run_beside(tasks: Sequence[Callable[[], None]]) -> float:
    """Run every task in a thread of its own; seconds until the last has ended. Raises what one raised."""
    failures: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - told to the caller
            failures.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - start
