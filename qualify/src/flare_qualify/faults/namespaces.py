"""Network namespaces: one alone for a rank that is reached through a proxy, or one a rank joined by a bridge.

On a bridged network links go down, routes turn into black holes and rates are bounded, one rank and one direction at
a time. Knows no rank's process: whoever starts one puts :attr:`Namespace.prefix` before its command.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from flare_qualify.faults.commands import FaultError, run
from flare_qualify.faults.names import NETNS_ROOT, unique_name

__all__ = ["Namespace", "Network", "listen_in", "network", "opened_namespace"]

_CLONE_NEWNET = 0x4000_0000
_RANK_INTERFACE = "eth0"
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
    """Ranks' namespaces on one bridge, which this host is on too.

    Attributes:
        namespaces: by rank. subnet: first three numbers of the addresses.
        host_ends: interface of this host that is the other end of a rank's, by rank.
    """

    namespaces: tuple[Namespace, ...]
    subnet: str
    host_ends: tuple[str, ...]

    def address(self, rank: int) -> str:
        """A rank's address; reached from every rank and from this host."""
        return f"{self.subnet}.{rank + 1}"

    def link_down(self, rank: int) -> str:
        """Take this rank off the network as a pulled cable does: nothing is told to either side; the evidence."""
        run("ip", "link", "set", self.host_ends[rank], "down")
        shown = json.loads(run("ip", "-j", "link", "show", "dev", self.host_ends[rank]))[0]
        if "UP" in shown["flags"]:
            raise FaultError(f"{self.host_ends[rank]} is still up: {shown['flags']}")
        return f"the link of rank {rank} is {shown['operstate']}"

    def link_up(self, rank: int) -> None:
        """Undo :meth:`link_down`."""
        run("ip", "link", "set", self.host_ends[rank], "up")

    def lose_route(self, rank: int, towards: int) -> str:
        """Nothing that ``rank`` sends to ``towards`` arrives any more; the other way stays open. The evidence."""
        namespace, address = self.namespaces[rank], self.address(towards)
        namespace.ip("route", "add", "blackhole", f"{address}/32")
        if "blackhole" not in (shown := namespace.ip("route", "show", f"{address}/32")):
            raise FaultError(f"no route to {address} is lost: {shown}")
        return f"rank {rank} has the route '{shown.strip()}'"

    def restore_route(self, rank: int, towards: int) -> None:
        """Undo :meth:`lose_route`."""
        self.namespaces[rank].ip("route", "del", "blackhole", f"{self.address(towards)}/32")

    def slow_down(self, rank: int, *, bits_per_second: int) -> None:
        """Bound what this rank sends."""
        shape = ["rate", f"{bits_per_second}bit", "burst", "16kb", "latency", "400ms"]
        name = self.namespaces[rank].name
        run("tc", "-n", name, "qdisc", "replace", "dev", _RANK_INTERFACE, "root", "tbf", *shape)

    def num_delayed(self, rank: int) -> int:
        """Packets of this rank that :meth:`slow_down` has made wait."""
        shown = json.loads(run("tc", "-n", self.namespaces[rank].name, "-s", "-j", "qdisc", "show"))
        return sum(int(one.get("overlimits", 0)) for one in shown if one.get("kind") == "tbf")


@contextlib.contextmanager
def network(num_ranks: int) -> Iterator[Network]:
    """A bridge and that many namespaces on it; all of it is gone afterwards.

    Raises:
        FaultError: not allowed here.
    """
    bridge, subnet = unique_name(), _free_subnet()
    with contextlib.ExitStack() as undo:
        run("ip", "link", "add", bridge, "type", "bridge")
        undo.callback(run, "ip", "link", "del", bridge)
        run("ip", "addr", "add", f"{subnet}.254/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        namespaces, host_ends = [], []
        for rank in range(num_ranks):
            namespace = undo.enter_context(opened_namespace())
            host_end = unique_name()
            run("ip", "link", "add", host_end, "type", "veth", "peer", _RANK_INTERFACE, "netns", namespace.name)
            # It goes with its namespace, but only once the last process in there is gone.
            undo.callback(_delete_link, host_end)
            run("ip", "link", "set", host_end, "master", bridge, "up")
            namespace.ip("addr", "add", f"{subnet}.{rank + 1}/24", "dev", _RANK_INTERFACE)
            namespace.ip("link", "set", _RANK_INTERFACE, "up")
            namespaces.append(namespace)
            host_ends.append(host_end)
        yield Network(tuple(namespaces), subnet, tuple(host_ends))


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
