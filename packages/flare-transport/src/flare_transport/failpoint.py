"""Named places where a process can be told to fail, so that faults are tried on real processes and not imagined.

`failpoint(name)` stands at each step of the record path, the join, the rendezvous and the engine's loop. It does
nothing until `arm` was given an order for some name; entry points of the command do that from `FLARE_FAILPOINT`, which
nothing here reads. Knows nothing of what happens at a name.

An order is `NAME:ACTION[@N]` or `NAME:ACTION[@N+]`: at the N-th time that this process comes to NAME (the first, if not
said), or from then on. Orders are joined by `;`.
"""

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["FAILPOINTS", "FAILPOINT_EXIT_CODE", "Failpoint", "FailpointError", "arm", "failpoint", "is_armed"]

FAILPOINT_EXIT_CODE = 99
"""What the action `exit` ends a process with: a code that no flare process ends with by itself."""

_ZERO = "rank 0"
_PEER = "peer"
_ANY = "any rank"
_POOL = "manager"


@dataclass(frozen=True, slots=True)
class Failpoint:
    """A name, which processes come to it, and what happens there next."""

    name: str
    where: str
    what: str


FAILPOINTS = (
    Failpoint("store.begin", _ANY, "a store on disk begins"),
    Failpoint("store.create", _ANY, "its temporary file is created"),
    Failpoint("store.write", _ANY, "a part of at most 8 MiB is written; once a part, on several threads"),
    Failpoint("store.header", _ANY, "the header is written: all pages are"),
    Failpoint("store.written", _ANY, "everything is written"),
    Failpoint("store.fsync", _ANY, "the file is fsynced (durability power)"),
    Failpoint("store.link", _ANY, "the file gets its final name"),
    Failpoint("store.unlink-temporary", _ANY, "the temporary name goes: the file has both"),
    Failpoint("store.published", _ANY, "the file has its final name alone"),
    Failpoint("store.fsync-directory", _ANY, "the directory is fsynced (durability power)"),
    Failpoint("store.ack", _ANY, "the rank answers for its part, in either tier"),
    Failpoint("store.report", _ZERO, "every rank has answered; the engine is told"),
    Failpoint("fetch.begin", _ANY, "a fetch from disk begins"),
    Failpoint("fetch.open", _ANY, "its file is opened"),
    Failpoint("fetch.header", _ANY, "its header is read"),
    Failpoint("fetch.read", _ANY, "a part of at most 8 MiB is read; once a part, on several threads"),
    Failpoint("fetch.verify", _ANY, "a part's digests are compared"),
    Failpoint("fetch.deliver", _ANY, "a verified part is handed to the pages"),
    Failpoint("fetch.ack", _ANY, "the rank answers for its part, from either tier"),
    Failpoint("fetch.report", _ZERO, "every rank has answered; the engine is told"),
    Failpoint("truncate.begin", _ANY, "a record's tail or row is to go"),
    Failpoint("truncate.cut", _ANY, "its file is cut"),
    Failpoint("truncate.ack", _ANY, "the rank answers"),
    Failpoint("truncate.report", _ZERO, "every rank has answered; the bytes are credited"),
    Failpoint("unlink.begin", _ANY, "a record is to go"),
    Failpoint("unlink.remove", _ANY, "its file is removed"),
    Failpoint("unlink.ack", _ANY, "the rank answers"),
    Failpoint("unlink.report", _ZERO, "every rank has answered; the bytes are credited"),
    Failpoint("put.ack", _ANY, "the rank answers for its shard in the pool"),
    Failpoint("put.report", _ZERO, "every rank has answered; the record can be committed in the pool"),
    Failpoint("pool.connect", _ANY, "the rank connects to the pool's manager"),
    Failpoint("pool.vote", _ANY, "the rank votes on the pool"),
    Failpoint("pool.lost", _ANY, "the rank has lost the pool's manager and says so"),
    Failpoint("pool.tell", _ZERO, "a peer is told of the pool: to connect, that it is on, that it is off"),
    Failpoint("pool.on", _ANY, "the pool is on for this rank"),
    Failpoint("pool.off", _ANY, "the pool is off for this rank"),
    Failpoint("manager.store-shard", _POOL, "a verified shard is made durable"),
    Failpoint("manager.commit", _POOL, "a record's manifest is put: it becomes visible"),
    Failpoint("manager.delete", _POOL, "objects are deleted"),
    Failpoint("undo.begin", _ZERO, "a store has failed somewhere: those that wrote it are told to unlink it"),
    Failpoint("join.scan", _ANY, "the record directory is read"),
    Failpoint("join.hello", _PEER, "the rank states its settings and records"),
    Failpoint("join.propose", _ZERO, "a peer is told what is to be kept"),
    Failpoint("join.confirm", _PEER, "the rank confirms what is to be kept"),
    Failpoint("join.apply", _ANY, "what is not kept is removed"),
    Failpoint("join.write-set", _ANY, "set.json is written"),
    Failpoint("join.applied", _ANY, "the rank says that it has removed the rest"),
    Failpoint("join.joined", _ANY, "the rank has joined and begins to serve jobs"),
    Failpoint("join.save-hint", _ANY, "join.idx is written, at an end in order"),
    Failpoint("rendezvous.listen", _ZERO, "the listener is open; peers are waited for"),
    Failpoint("rendezvous.hello", _PEER, "the peer has connected and sends its nonce"),
    Failpoint("rendezvous.welcome", _ZERO, "a peer is challenged"),
    Failpoint("rendezvous.proof", _PEER, "the peer answers the challenge"),
    Failpoint("rendezvous.accept", _ZERO, "a peer that has proven itself is let in"),
    Failpoint("rendezvous.met", _ANY, "all ranks have come"),
    Failpoint("record-link.offer", _ZERO, "the record listener is open; a peer is told its port"),
    Failpoint("record-link.connect", _PEER, "the peer connects to the record listener"),
    Failpoint("record-link.accept", _ZERO, "a peer's proof on its record link was right; it is told so"),
    Failpoint("step.send", _ZERO, "a step plan is sent to the peers"),
    Failpoint("step.launch", _ANY, "a step is launched: the next thing may be a collective"),
    Failpoint("step.result", _ANY, "a step's result is waited for"),
)


class FailpointError(ValueError):
    """Text that is no order; the message says which part and what would be right."""


@dataclass(slots=True)
class _Order:
    """What is to happen at the `first`-th time, or from then on. `num_reached` changes under `lock`."""

    label: str
    act: Callable[[], None]
    first: int
    is_lasting: bool
    num_reached: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_due(self) -> bool:
        """Count one time more."""
        with self.lock:
            self.num_reached += 1
            return self.num_reached == self.first or (self.is_lasting and self.num_reached > self.first)


# The one state that belongs to a module in all of flare: a process is sabotaged as a whole, and threading an object
# through every call on the hot path for it would cost more than it explains.
_orders: dict[str, list[_Order]] = {}


def failpoint(name: str) -> None:
    """Do what was ordered for `name`, if anything was. Blocks, raises OSError or does not return if told to."""
    if _orders:
        for order in [order for order in _orders.get(name, ()) if order.is_due()]:
            # Not through logging: its lock may be held, and the process may be about to die.
            os.write(2, f"failpoint {name}: {order.label}\n".encode())
            order.act()


def is_armed() -> bool:
    """Whether this process was given any order."""
    return bool(_orders)


def arm(spec: str) -> None:
    """Replace this process's orders by those in `spec`; none if it is empty.

    Raises `FailpointError`, having changed nothing.
    """
    orders: dict[str, list[_Order]] = {}
    for text in filter(None, (part.strip() for part in spec.split(";"))):
        name, order = _parse(text)
        orders.setdefault(name, []).append(order)
    _orders.clear()
    _orders.update(orders)


def _parse(text: str) -> tuple[str, _Order]:
    found = re.fullmatch(r"([a-z.-]+):([a-z]+)(?:=([A-Za-z0-9.]+))?(?:@([1-9][0-9]*)(\+?))?", text)
    if found is None:
        raise FailpointError(f"{text!r} is no order: write NAME:ACTION, NAME:ACTION@N or NAME:ACTION@N+")
    name, action, value, first, lasting = found.groups()
    known = [point.name for point in FAILPOINTS]
    if name not in known:
        raise FailpointError(f"{name!r} is no failpoint; known are {', '.join(known)}")
    label = action if value is None else f"{action}={value}"
    return name, _Order(label, _action(action, value), int(first or 1), bool(lasting))


def _action(action: str, value: str | None) -> Callable[[], None]:
    if value is None and action in _PLAIN_ACTIONS:
        return _PLAIN_ACTIONS[action]
    if action == "pause" and value is not None:
        seconds = _seconds(value)
        return lambda: time.sleep(seconds)
    if action == "error" and value is not None:
        code = getattr(errno, value, None)
        if isinstance(code, int):
            return lambda: _raise(code)
        raise FailpointError(f"{value!r} is no error number; write one like EIO or ENOSPC")
    label = action if value is None else f"{action}={value}"
    known = ", ".join([*_PLAIN_ACTIONS, "pause=500ms", "error=EIO"])
    raise FailpointError(f"{label!r} is no action; known are {known}")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s)", text)
    if found is None:
        raise FailpointError(f"{text!r} is no pause; write one like 500ms or 5s")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit() -> None:
    os._exit(FAILPOINT_EXIT_CODE)


def _hang() -> None:
    while True:
        time.sleep(3600)


def _raise(code: int) -> None:
    raise OSError(code, os.strerror(code))


_PLAIN_ACTIONS: dict[str, Callable[[], None]] = {"kill": _kill, "stop": _stop, "exit": _exit, "hang": _hang}
