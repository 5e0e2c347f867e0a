"""Network namespaces: one alone for a peer that is reached through a proxy, or one a peer joined by a bridge.

On a bridged network cables are pulled, packets of one direction are lost and rates are bounded. Knows no rank's
process: whoever starts one puts :attr:`Namespace.prefix` before its command.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flare_qualify.faults.commands import FaultError, run
from flare_qualify.faults.names import NETNS_ROOT, sweep_leftovers, unique_name

__all__ = ["Namespace", "Network", "listen_in", "network", "opened_namespace"]

_CLONE_NEWNET = 0x4000_0000
_RANK_INTERFACE = "eth0"
_NOBODY = "02:00:00:00:00:01"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace with its loopback up."""

    name: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that is to run in it; the command then is that very process."""
        return ("nsenter", f"--net={NETNS_ROOT / self.name}")

    def ip(self, *words: str) -> str:
        """``ip`` with these words, in the namespace."""
        return run("ip", "-n", self.name, *words)


@contextlib.contextmanager
def opened_namespace() -> Iterator[Namespace]:
    """A namespace with nothing but a loopback; gone afterwards, once no process is left in it.

    Raises:
        FaultError: not allowed here.
    """
    name = unique_name()
    run("ip", "netns", "add", name)
    try:
        namespace = Namespace(name)
        namespace.ip("link", "set", "lo", "up")
        yield namespace
    finally:
        run("ip", "netns", "del", name)


def listen_in(namespace: Namespace, host: str, port: int) -> socket.socket:
    """A socket that listens inside the namespace; its connections can be used from anywhere in this process."""
    return _inside(namespace, lambda: socket.create_server((host, port)))


def _inside(namespace: Namespace, call: Callable[[], _T]) -> _T:
    """Run ``call`` on a thread that has entered the namespace; only that thread ever does."""
    results: list[_T] = []
    failures: list[BaseException] = []

    def enter_and_call() -> None:
        try:
            fd = os.open(NETNS_ROOT / namespace.name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
                    code = ctypes.get_errno()
                    raise OSError(code, f"setns: {os.strerror(code)}")
            finally:
                os.close(fd)
            results.append(call())
        except BaseException as error:  # noqa: BLE001  raised again on the calling thread
            failures.append(error)

    thread = threading.Thread(target=enter_and_call, name="inside a namespace")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


@dataclass(frozen=True, slots=True)
class Network:
    """A bridge on this host, where rank zero runs, and a namespace on it for each peer.

    Attributes:
        bridge: its interface here. subnet: first three numbers of the addresses.
        namespaces: of the peers, by rank. host_ends: interface here that is the other end of a peer's, by rank.
    """

    bridge: str
    subnet: str
    namespaces: Mapping[int, Namespace]
    host_ends: Mapping[int, str]

    def address(self, rank: int) -> str:
        """A rank's address."""
        return f"{self.subnet}.{rank + 1}"

    def pull(self, rank: int) -> str:
        """Take a peer off the network as a pulled cable does: nothing is told to either side. The evidence.

        Raises:
            FaultError: its link stays up.
        """
        run("ip", "link", "set", self.host_ends[rank], "down")
        shown = json.loads(run("ip", "-j", "link", "show", "dev", self.host_ends[rank]))[0]
        if "UP" in shown["flags"]:
            raise FaultError(f"{self.host_ends[rank]} is still up: {shown['flags']}")
        return f"the link of rank {rank} is {shown['operstate']}"

    def plug(self, rank: int) -> None:
        """Undo :meth:`pull`."""
        run("ip", "link", "set", self.host_ends[rank], "up")

    def lose_packets(self, *, sender: int, receiver: int) -> str:
        """What ``sender`` sends to ``receiver`` is addressed to nobody; the other way stays open. The evidence.

        Raises:
            FaultError: the sender's table of neighbours was not changed.
        """
        where = ["dev", _RANK_INTERFACE if sender else self.bridge]
        entry = ["to", self.address(receiver), *where]
        self._ip(sender, "neigh", "replace", self.address(receiver), "lladdr", _NOBODY, *where, "nud", "permanent")
        if _NOBODY not in (shown := self._ip(sender, "neigh", "show", *entry)):
            raise FaultError(f"rank {sender} still knows its neighbour: {shown}")
        return f"rank {sender} takes {shown.strip()} for rank {receiver}"

    def find_packets(self, *, sender: int, receiver: int) -> None:
        """Undo :meth:`lose_packets`."""
        where = ["dev", _RANK_INTERFACE if sender else self.bridge]
        self._ip(sender, "neigh", "del", self.address(receiver), *where)

    def slow_down(self, rank: int, *, bits_per_second: int) -> None:
        """Bound what goes to and from a peer."""
        shape = ["root", "tbf", "rate", f"{bits_per_second}bit", "burst", "4kb", "latency", "2s"]
        run("tc", "qdisc", "replace", "dev", self.host_ends[rank], *shape)
        run("tc", "-n", self.namespaces[rank].name, "qdisc", "replace", "dev", _RANK_INTERFACE, *shape)

    def num_delayed(self, rank: int) -> int:
        """Packets to and from a peer that :meth:`slow_down` has made wait."""
        shown = json.loads(run("tc", "-s", "-j", "qdisc", "show", "dev", self.host_ends[rank]))
        shown += json.loads(run("tc", "-n", self.namespaces[rank].name, "-s", "-j", "qdisc", "show"))
        return sum(int(one.get("overlimits", 0)) for one in shown if one.get("kind") == "tbf")

    def _ip(self, rank: int, *words: str) -> str:
        return self.namespaces[rank].ip(*words) if rank else run("ip", *words)


@contextlib.contextmanager
def network(world_size: int) -> Iterator[Network]:
    """A bridge and a namespace for each peer; all of it is gone afterwards.

    Raises:
        FaultError: not allowed here.
    """
    sweep_leftovers()
    bridge, subnet = unique_name(), _free_subnet()
    namespaces, host_ends = {}, {}
    with contextlib.ExitStack() as undo:
        run("ip", "link", "add", bridge, "type", "bridge")
        undo.callback(run, "ip", "link", "del", bridge)
        run("ip", "addr", "add", f"{subnet}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for rank in range(1, world_size):
            namespaces[rank] = namespace = undo.enter_context(opened_namespace())
            host_ends[rank] = host_end = unique_name()
            run("ip", "link", "add", host_end, "type", "veth", "peer", _RANK_INTERFACE, "netns", namespace.name)
            # It goes with its namespace, but only once the last process in there is gone.
            undo.callback(_delete_link, host_end)
            run("ip", "link", "set", host_end, "master", bridge, "up")
            namespace.ip("addr", "add", f"{subnet}.{rank + 1}/24", "dev", _RANK_INTERFACE)
            namespace.ip("link", "set", _RANK_INTERFACE, "up")
        yield Network(bridge, subnet, namespaces, host_ends)


def _delete_link(name: str) -> None:
    with contextlib.suppress(FaultError):
        run("ip", "link", "del", name)


def _free_subnet() -> str:
    """A subnet of 10.0.0.0/8 that no interface here has."""
    taken = run("ip", "-4", "-o", "addr", "show")
    while True:
        subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
        if f" {subnet}." not in taken:
            return subnet
