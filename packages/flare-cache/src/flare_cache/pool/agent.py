"""The shells around the agreement's machines: connecting in threads, messages over the record links, a clock.

Events run a machine in the thread that brings them (see :mod:`flare_cache.turnstile`), so that a rank is on before the
next frame of its record link, a job perhaps, is looked at. Connecting and closing, which block, have threads of their
own. What is done with a session is not known here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from flare_cache.pool.agreement import (
    Connect,
    Disconnect,
    LeaderEffect,
    PoolLeader,
    PoolState,
    PoolVoter,
    Say,
    StateChanged,
    SwitchedOff,
    SwitchedOn,
    Tell,
    VoterEffect,
)
from flare_cache.pool.agreement_messages import (
    Lost,
    PoolMessage,
    Propose,
    TurnOff,
    TurnOn,
    Vote,
    decode_pool_message,
    encode_pool_message,
)
from flare_cache.pool.messages import Reply, Request
from flare_cache.turnstile import Turnstile
from flare_transport.errors import TransportError
from flare_transport.failpoint import failpoint

__all__ = ["LeaderPoolAgent", "PoolAgent", "PoolConnection", "PoolStatus", "PoolSwitch"]

_TICK_SECONDS = 0.05
_SAY_POINTS = {True: "pool.vote", False: "pool.lost"}
_log = logging.getLogger(__name__)


class PoolConnection(Protocol):
    """A registered connection to a manager; :class:`flare_cache.pool.client.PoolClient` is one."""

    @property
    def epoch(self) -> bytes:
        """Of the manager's process."""
        ...

    @property
    def manager(self) -> str:
        """Its name, for people."""
        ...

    def request_later(
        self, request: Request, on_reply: Callable[[Reply | None], None], *, timeout_seconds: float
    ) -> None:
        """Ask without blocking; ``on_reply`` is called once, in any thread, with None where no answer came."""
        ...

    def close(self) -> None:
        """End it; ``on_lost`` may still be called. Blocks shortly."""
        ...


class PoolSwitch(Protocol):
    """What a rank does with a session. Neither method blocks."""

    def turn_on(self, session: bytes, connection: PoolConnection) -> None:
        """Take jobs of ``session``, over ``connection``."""
        ...

    def turn_off(self, reason: str) -> None:
        """Take none."""
        ...


Open = Callable[[int, bytes, Callable[[str], None]], PoolConnection]
"""Address index, session, and what to call when the connection ends; blocks. Raises TransportError, OSError."""


def run_in_thread(task: Callable[[], None]) -> None:
    """Run ``task`` in a thread of its own."""
    threading.Thread(target=task, name="flare pool connection", daemon=True).start()


class PoolAgent:
    """One rank's half: its voter, and the connection that it votes about.

    Args:
        voter: the machine.
        open_connection: see :data:`Open`.
        switches: are turned on and off with the session, in this order.
        say: takes what is to be sent to rank zero; must not block.
        run_apart: runs what blocks.
    """

    def __init__(
        self,
        voter: PoolVoter,
        *,
        open_connection: Open,
        switches: Sequence[PoolSwitch],
        say: Callable[[PoolMessage], None],
        run_apart: Callable[[Callable[[], None]], None] = run_in_thread,
    ) -> None:
        self._voter = voter
        self._open = open_connection
        self._switches = switches
        self._say = say
        self._run_apart = run_apart
        self._turnstile: Turnstile[Callable[[], list[VoterEffect]]] = Turnstile(self._handle)
        self._connections: dict[bytes, PoolConnection] = {}

    def receive(self, payload: bytes | memoryview) -> None:
        """A RECORD_POOL frame came from rank zero. Raises msgspec.DecodeError when it is none."""
        message = decode_pool_message(payload)
        if isinstance(message, Vote | Lost):
            raise msgspec.ValidationError(f"rank 0 says {type(message).__name__}")
        self.hear(message)

    def hear(self, message: Propose | TurnOn | TurnOff) -> None:
        """Rank zero has spoken. Does not block."""
        self._turnstile.post(lambda: self._voter.heard(message))

    def close(self) -> None:
        """Give connections up; the group ends. Blocks for what their closing takes."""
        for connection in list(self._connections.values()):
            connection.close()

    def _handle(self, event: Callable[[], list[VoterEffect]]) -> None:
        failure = self._perform_all(event())
        if failure is not None:
            # The pool poisons nothing: the rank goes on without this session. Should it not be able to say so, rank
            # zero finds out by its deadline, or by jobs that this rank misses.
            self._perform_all(self._voter.fault(failure))

    def _perform_all(self, effects: Sequence[VoterEffect]) -> str | None:
        """Perform each, whatever becomes of the others; what went wrong, if anything."""
        failure: str | None = None
        for effect in effects:
            try:
                self._perform(effect)
            except Exception as error:  # noqa: BLE001 - the boundary of every thread that brings events
                _log.exception("the pool's agent failed")
                failure = f"internal: {type(error).__name__}: {error}"
        return failure

    def _perform(self, effect: VoterEffect) -> None:
        match effect:
            case Connect(session, address):
                self._run_apart(lambda: self._connect(session, address))
            case Disconnect(session):
                connection = self._connections.pop(session, None)
                if connection is not None:
                    self._run_apart(connection.close)
            case SwitchedOn(session):
                failpoint("pool.on")
                for switch in self._switches:
                    switch.turn_on(session, self._connections[session])
            case SwitchedOff(_, reason):
                for switch in reversed(self._switches):
                    switch.turn_off(reason)
                failpoint("pool.off")
            case Say(message):
                failpoint(_SAY_POINTS[isinstance(message, Vote)])
                self._say(message)

    def _connect(self, session: bytes, address: int) -> None:
        try:
            failpoint("pool.connect")
            connection = self._open(address, session, lambda reason: self._lost(session, reason))
        except Exception as error:  # noqa: BLE001 - a thread's boundary; whatever it is, this rank votes no
            if not isinstance(error, TransportError | OSError):
                _log.exception("connecting to the pool failed in a way that was not foreseen")
            text = str(error) or type(error).__name__
            self._turnstile.post(lambda: self._voter.failed(session, text))
            return
        self._turnstile.post(lambda: self._connected(session, connection))

    def _connected(self, session: bytes, connection: PoolConnection) -> list[VoterEffect]:
        self._connections[session] = connection
        return self._voter.connected(session, connection.epoch)

    def _lost(self, session: bytes, reason: str) -> None:
        self._turnstile.post(lambda: self._voter.lost(session, reason))


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Where the agreement stands, for people.

    Attributes:
        state: of the pool.
        reasons: why it is off, by rank; -1 for all.
        since: monotonic seconds of the last change between on and off.
        num_sessions: times that it came on.
    """

    state: PoolState = PoolState.OFF
    reasons: Mapping[int, str] = field(default_factory=dict)
    since: float = 0.0
    num_sessions: int = 0


class LeaderPoolAgent:
    """Rank zero's half: the agreement, over the record links, with a clock.

    Args:
        leader: the machine.
        tell: sends a payload to a peer; must not block.
        clock: monotonic seconds.
    """

    def __init__(
        self, leader: PoolLeader, *, tell: Callable[[int, bytes], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._leader = leader
        self._tell = tell
        self._clock = clock
        self._own: PoolAgent | None = None
        self._turnstile: Turnstile[Callable[[float], list[LeaderEffect]]] = Turnstile(self._handle)
        self._status = PoolStatus(since=clock())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_clock, name="flare pool agreement", daemon=True)

    @property
    def status(self) -> PoolStatus:
        """Now."""
        state = self._leader.state
        kept = self._status
        return PoolStatus(state, kept.reasons, kept.since, kept.num_sessions)

    def start(self, own: PoolAgent) -> None:
        """Begin, with rank zero's own half."""
        self._own = own
        self._thread.start()

    def receive(self, rank: int, payload: bytes | memoryview) -> None:
        """A RECORD_POOL frame came from a peer. Raises msgspec.DecodeError when it is none."""
        message = decode_pool_message(payload)
        if not isinstance(message, Vote | Lost):
            raise msgspec.ValidationError(f"rank {rank} says {type(message).__name__}")
        self.heard(rank, message)

    def heard(self, rank: int, message: PoolMessage) -> None:
        """A voter has spoken. Does not block."""
        if isinstance(message, Vote | Lost):
            self._turnstile.post(lambda now: self._leader.heard(rank, message, now))

    def close(self) -> None:
        """Off for good: every rank is told."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._turnstile.post(lambda now: self._leader.stop("the group ends", now))
        if self._own is not None:
            self._own.close()

    def _run_clock(self) -> None:
        while not self._closing.is_set():
            self._turnstile.post(self._leader.tick)
            self._closing.wait(_TICK_SECONDS)

    def _handle(self, event: Callable[[float], list[LeaderEffect]]) -> None:
        failure = self._perform_all(event(self._clock()))
        if failure is not None:
            # The pool poisons nothing: whoever was not told is told that the session is over.
            self._perform_all(self._leader.fault(failure, self._clock()))

    def _perform_all(self, effects: Sequence[LeaderEffect]) -> str | None:
        """Perform each, whatever becomes of the others; what went wrong, if anything."""
        failure: str | None = None
        for effect in effects:
            try:
                self._perform(effect)
            except Exception as error:  # noqa: BLE001 - the boundary of every thread that brings events
                _log.exception("the pool's agreement failed")
                failure = f"internal: {type(error).__name__}: {error}"
        return failure

    def _perform(self, effect: LeaderEffect) -> None:
        match effect:
            case Tell(0, message):
                if self._own is not None:
                    self._own.hear(message)
            case Tell(rank, message):
                failpoint("pool.tell")
                self._tell(rank, encode_pool_message(message))
            case StateChanged():
                self._changed(effect)

    def _changed(self, effect: StateChanged) -> None:
        old, now = self._status, self._clock()
        if effect.state is PoolState.ON:
            _log.info("the pool is on, on every rank")
            self._status = PoolStatus(PoolState.ON, {}, now, old.num_sessions + 1)
            return
        if old.state is PoolState.ON or dict(effect.reasons) != dict(old.reasons):
            text = "; ".join(r if rank < 0 else f"rank {rank}: {r}" for rank, r in sorted(effect.reasons.items()))
            level = logging.INFO if self._closing.is_set() else logging.WARNING
            _log.log(level, "the pool is off on every rank, local tiers serve: %s", text)
        since = now if old.state is PoolState.ON else old.since
        self._status = PoolStatus(PoolState.OFF, effect.reasons, since, old.num_sessions)
