"""A peer all of whose connections to rank zero go through a fault proxy: the control link and the record link.

The peer runs in a network namespace of its own, where 127.0.0.1 is the proxy. It dials the rendezvous there; the record
link's port is chosen by rank zero and told to the peer over the control link, so whenever rank zero has said
something there, the proxy first listens, in the peer's namespace, wherever rank zero listens here. Rank zero sees both
connections come from one address, as it demands.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flare_qualify.faults.names import sweep_leftovers
from flare_qualify.faults.namespaces import Namespace, listen_in, opened_namespace
from flare_qualify.faults.processes import session_members
from flare_qualify.faults.proxy import FaultProxy

__all__ = ["CONTROL", "RECORDS", "ProxiedPeer", "listening_ports", "proxied_peer"]

CONTROL = "control link"
RECORDS = "record link"
_HOST = "127.0.0.1"
_LISTEN = "0A"


@dataclass(slots=True)
class ProxiedPeer:
    """``prefix`` goes before the peer's command. Routes of ``proxy`` are :data:`CONTROL` and :data:`RECORDS`.

    Attributes:
        listening: ports at which rank zero's processes listen now.
    """

    namespace: Namespace
    proxy: FaultProxy
    listening: Callable[[], set[int]]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _mirrored: set[int] = field(default_factory=set)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before the peer's command."""
        return self.namespace.prefix

    def meet_at(self, port: int) -> None:
        """The ranks are about to meet at 127.0.0.1 and this port, before the peer is started or while it tries."""
        with self._lock:
            self._mirrored.add(port)
        self._open(CONTROL, port, self._mirror)

    def _mirror(self) -> None:
        """Listen wherever rank zero does; on a connection's thread, before the peer hears of it."""
        if self.proxy.num_connections(RECORDS):
            return
        with self._lock:
            ports = self.listening() - self._mirrored
            self._mirrored |= ports
            for port in sorted(ports):
                self._open(RECORDS, port, lambda: None)

    def _open(self, name: str, port: int, before_answer: Callable[[], None]) -> None:
        listener = listen_in(self.namespace, _HOST, port)
        self.proxy.open_route(name, listener, (_HOST, port), before_answer=before_answer)


@contextlib.contextmanager
def proxied_peer(listening: Callable[[], set[int]]) -> Iterator[ProxiedPeer]:
    """A namespace and a proxy for one peer and one start of its group; both are gone afterwards.

    Raises:
        FaultError: namespaces are not allowed here.
    """
    sweep_leftovers()
    with opened_namespace() as namespace, FaultProxy() as proxy:
        yield ProxiedPeer(namespace, proxy, listening)


def listening_ports(leader: int) -> set[int]:
    """TCP ports of IPv4 at which the processes of the session of ``leader`` listen in this namespace."""
    inodes = set()
    for pid in session_members(leader):
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(link.readlink()))
    ports = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in inodes:
            ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
