"""All ranks use the pool in one session, or none does: rank zero's machine and every rank's.

State machines without socket, thread or clock: messages, what became of connecting, and ``now`` go in, effects come
out. Rank zero's own half connects first, so that the manager's epoch is known before the others are asked::

    OFF --retry--> PROPOSED to rank zero --yes--> PROPOSED to the others --all yes--> ON
     ^                  |                             |                               |
     +-- no, deadline --+-- no, another epoch, late --+-- some rank lost its manager -+

A rank that is on answers jobs of its session only: whatever the order in which ranks learn of the end of a session, a
job of it fails on some rank and restores nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flare_cache.pool.agreement_messages import Lost, Propose, TurnOff, TurnOn, Vote

__all__ = [
    "AgreementTimes",
    "Connect",
    "Disconnect",
    "LeaderEffect",
    "PoolLeader",
    "PoolState",
    "PoolVoter",
    "Say",
    "StateChanged",
    "SwitchedOff",
    "SwitchedOn",
    "Tell",
    "VoterEffect",
]


@dataclass(frozen=True, slots=True)
class AgreementTimes:
    """Seconds.

    Attributes:
        vote_seconds: from a proposal until every rank must have voted.
        least_pause, early_pause, late_pause: before the next attempt: at least the first, at most the second while the
            pool has been off for less than ``early_seconds``, then at most the third.
    """

    vote_seconds: float = 10.0
    least_pause: float = 0.1
    early_pause: float = 1.0
    late_pause: float = 5.0
    early_seconds: float = 60.0


class PoolState(enum.StrEnum):
    """What rank zero makes of the pool now."""

    OFF = "off"
    JOINING = "joining"
    ON = "on"


# -- every rank ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to the manager at the ``address``-th address and register in ``session``; then tell the voter."""

    session: bytes
    address: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Give the connection of ``session`` up, or the attempt at it."""

    session: bytes


@dataclass(frozen=True, slots=True)
class SwitchedOn:
    """Take jobs of ``session`` from now on."""

    session: bytes


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    """Take no more jobs of ``session``."""

    session: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """Send to rank zero."""

    message: Vote | Lost


VoterEffect = Connect | Disconnect | SwitchedOn | SwitchedOff | Say


class PoolVoter:
    """One rank's half, rank zero's included. ``settings``: digest of what must be equal on every rank."""

    def __init__(self, rank: int, *, settings: bytes) -> None:
        self._rank = rank
        self._settings = settings
        self._proposal: Propose | None = None
        self._is_connected = False
        self._is_on = False

    @property
    def session(self) -> bytes | None:
        """The session whose jobs are taken, or None while the pool is off here."""
        return self._proposal.session if self._proposal is not None and self._is_on else None

    def heard(self, message: Propose | TurnOn | TurnOff) -> list[VoterEffect]:
        """Rank zero has spoken."""
        match message:
            case Propose():
                return self._proposed(message)
            case TurnOn(session):
                if self._is_mine(session) and self._is_connected and not self._is_on:
                    self._is_on = True
                    return [SwitchedOn(session)]
                return []
            case TurnOff(session, reason):
                return self._end(reason) if self._is_mine(session) else []

    def connected(self, session: bytes, epoch: bytes) -> list[VoterEffect]:
        """Registered with the manager, whose process has this epoch."""
        if not self._is_mine(session) or self._proposal is None or self._is_connected:
            return [Disconnect(session)]
        expected = self._proposal.epoch
        if expected and epoch != expected:
            return self._refuse("the manager was started anew between the ranks")
        self._is_connected = True
        return [Say(Vote(session, self._rank, epoch, ""))]

    def failed(self, session: bytes, reason: str) -> list[VoterEffect]:
        """The manager cannot be reached, or has refused."""
        return self._refuse(reason) if self._is_mine(session) and not self._is_connected else []

    def lost(self, session: bytes, reason: str) -> list[VoterEffect]:
        """The link to the manager has ended."""
        if not self._is_mine(session):
            return []
        return [*self._end(reason), Say(Lost(session, self._rank, reason))]

    def fault(self, reason: str) -> list[VoterEffect]:
        """This rank could not do what it was to do: whatever session there is, it is out of it."""
        return [] if self._proposal is None else self.lost(self._proposal.session, reason)

    def _proposed(self, proposal: Propose) -> list[VoterEffect]:
        effects = self._end("rank 0 proposes another session")
        self._proposal = proposal
        if proposal.settings != self._settings:
            return [*effects, *self._refuse("the pool's settings differ from those of rank 0")]
        return [*effects, Connect(proposal.session, proposal.address)]

    def _refuse(self, reason: str) -> list[VoterEffect]:
        session = b"" if self._proposal is None else self._proposal.session
        return [*self._end(reason), Say(Vote(session, self._rank, b"", reason or "no reason given"))]

    def _end(self, reason: str) -> list[VoterEffect]:
        proposal, was_on = self._proposal, self._is_on
        self._proposal, self._is_connected, self._is_on = None, False, False
        if proposal is None:
            return []
        off: list[VoterEffect] = [SwitchedOff(proposal.session, reason)] if was_on else []
        return [*off, Disconnect(proposal.session)]

    def _is_mine(self, session: bytes) -> bool:
        return self._proposal is not None and self._proposal.session == session


# -- rank zero -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand to the voter of ``rank``; rank zero's is here."""

    rank: int
    message: Propose | TurnOn | TurnOff


@dataclass(frozen=True, slots=True)
class StateChanged:
    """For the log and the status: the state, the session where it is on, and why it is off, by rank.

    A reason under no rank's number but -1 is everybody's.
    """

    state: PoolState
    session: bytes | None
    reasons: Mapping[int, str]


LeaderEffect = Tell | StateChanged


@dataclass(slots=True)
class _Attempt:
    session: bytes
    proposal: Propose
    due_at: float
    votes: dict[int, Vote] = field(default_factory=dict)


class PoolLeader:
    """Rank zero's machine, beside its own :class:`PoolVoter`. Begins off; :meth:`tick` makes the first attempt.

    Args:
        world_size: ranks, rank zero included.
        num_addresses: of ``--pool``; an attempt that fails leads to the next one.
        settings: as the voters'.
        draw_session: 16 random bytes.
        draw_fraction: uniform in [0, 1), for the pause.
    """

    def __init__(
        self,
        *,
        world_size: int,
        num_addresses: int,
        settings: bytes,
        draw_session: Callable[[], bytes],
        draw_fraction: Callable[[], float],
        times: AgreementTimes | None = None,
    ) -> None:
        self._ranks = range(world_size)
        self._num_addresses = num_addresses
        self._settings = settings
        self._draw_session = draw_session
        self._draw_fraction = draw_fraction
        self._times = times or AgreementTimes()
        self._address = 0
        self._attempt: _Attempt | None = None
        self._is_on = False
        self._retry_at = 0.0
        self._off_since: float | None = None
        self._is_stopped = False

    @property
    def state(self) -> PoolState:
        """Off, or on on every rank (a peer may not have heard it yet), or being agreed on."""
        if self._attempt is None:
            return PoolState.OFF
        return PoolState.ON if self._is_on else PoolState.JOINING

    @property
    def session(self) -> bytes | None:
        """The session that all ranks are in, or None."""
        return self._attempt.session if self._attempt is not None and self._is_on else None

    def tick(self, now: float) -> list[LeaderEffect]:
        """Time has passed: a vote may be overdue, or the next attempt due."""
        attempt = self._attempt
        if attempt is None:
            return [] if self._is_stopped or now < self._retry_at else self._propose(now)
        if self._is_on or now < attempt.due_at:
            return []
        asked = self._ranks if 0 in attempt.votes else (0,)
        seconds = self._times.vote_seconds
        missing = {rank: f"has not voted within {seconds:g} s" for rank in asked if rank not in attempt.votes}
        return self._end(missing, now)

    def next_timer(self) -> float | None:
        """When :meth:`tick` is next needed, or None."""
        if self._attempt is None:
            return None if self._is_stopped else self._retry_at
        return None if self._is_on else self._attempt.due_at

    def heard(self, rank: int, message: Vote | Lost, now: float) -> list[LeaderEffect]:
        """The voter of ``rank`` has spoken; what it says of another session, or for another rank, is nothing."""
        attempt = self._attempt
        if attempt is None or message.session != attempt.session or message.rank != rank or rank not in self._ranks:
            return []
        match message:
            case Lost(reason=reason):
                return self._end({rank: reason}, now)
            case Vote(reason=reason) if reason:
                return self._end({rank: reason}, now)
            case Vote():
                return self._voted(attempt, message, now)

    def fault(self, reason: str, now: float) -> list[LeaderEffect]:
        """Some rank may not have heard what it was told: the session, if there is one, is over."""
        return self._end({-1: reason}, now)

    def stop(self, reason: str, now: float) -> list[LeaderEffect]:
        """Off for good: the group ends."""
        self._is_stopped = True
        return [] if self._attempt is None else self._end({-1: reason}, now)

    def _propose(self, now: float) -> list[LeaderEffect]:
        if self._off_since is None:
            self._off_since = now
        session = self._draw_session()
        proposal = Propose(session, self._address, b"", self._settings)
        self._attempt = _Attempt(session, proposal, now + self._times.vote_seconds)
        return [Tell(0, proposal)]

    def _voted(self, attempt: _Attempt, vote: Vote, now: float) -> list[LeaderEffect]:
        if self._is_on or vote.rank in attempt.votes:
            return []
        if vote.rank != 0 and 0 not in attempt.votes:
            return []
        attempt.votes[vote.rank] = vote
        if vote.rank == 0:
            first = Propose(attempt.session, self._address, vote.epoch, self._settings)
            attempt.due_at = now + self._times.vote_seconds
            effects: list[LeaderEffect] = [Tell(rank, first) for rank in self._ranks if rank != 0]
            return effects or self._turn_on(attempt)
        if vote.epoch != attempt.votes[0].epoch:
            return self._end({vote.rank: "is registered with another manager"}, now)
        return self._turn_on(attempt) if len(attempt.votes) == len(self._ranks) else []

    def _turn_on(self, attempt: _Attempt) -> list[LeaderEffect]:
        self._is_on = True
        self._off_since = None
        # Rank zero last: its jobs come after the others' word, on the same links.
        told: list[LeaderEffect] = [Tell(rank, TurnOn(attempt.session)) for rank in reversed(self._ranks)]
        return [*told, StateChanged(PoolState.ON, attempt.session, {})]

    def _end(self, reasons: Mapping[int, str], now: float) -> list[LeaderEffect]:
        attempt, was_on = self._attempt, self._is_on
        self._attempt, self._is_on = None, False
        if attempt is None:
            return []
        if self._off_since is None:
            self._off_since = now
        if not was_on:
            self._address = (self._address + 1) % self._num_addresses
        times = self._times
        is_early = now - self._off_since < times.early_seconds
        most = times.early_pause if is_early else times.late_pause
        self._retry_at = now + times.least_pause + self._draw_fraction() * (most - times.least_pause)
        text = "; ".join(reason if rank < 0 else f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
        told: list[LeaderEffect] = [Tell(rank, TurnOff(attempt.session, text)) for rank in self._ranks]
        return [StateChanged(PoolState.OFF, None, dict(reasons)), *told]
