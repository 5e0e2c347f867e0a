"""Runs the join over started record links, on the thread that starts the rank. Blocks until it is over.

Messages come from the links' threads through one queue. What is agreed is the machines' business.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from flare_cache.dispatcher import RecordLink
from flare_cache.join import ApplyHere, Finished, JoinEffect, JoinFailed, JoinLeader, JoinPeer, Tell
from flare_cache.join_messages import Applied, Confirmed, Hello, JoinMessage, Proposal, decode_message, encode_message
from flare_cache.record_link import RECORD_JOIN
from flare_core.errors import FlareError
from flare_transport.errors import QueueFull, TransportError
from flare_transport.failpoint import failpoint
from flare_transport.router import LinkEnd, Router

__all__ = ["JOIN_TIMEOUT_SECONDS", "JoinInbox", "JoinRun", "join_as_leader", "join_as_peer"]

JOIN_TIMEOUT_SECONDS = 120.0
"""From the first message to the last; scans of a cold directory of 100,000 records fit many times."""

_RETRY_SECONDS = 0.01
_TELL_POINTS = {Hello: "join.hello", Proposal: "join.propose", Confirmed: "join.confirm"}

ApplyVerdicts = Callable[[ApplyHere], Applied]


@dataclass(frozen=True, slots=True)
class _Lost:
    reason: str


class JoinInbox:
    """Messages of all record links, in the order they came. What comes after the join is not read."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[tuple[int, JoinMessage | _Lost]] = queue.SimpleQueue()

    def route(self, router: Router, rank: int) -> None:
        """Declare the join's route on the record link to ``rank``, before that link is started."""
        router.route(RECORD_JOIN, lambda _, payload: self._came(rank, payload))
        router.on_end(lambda _, end: self._ended(rank, end))

    def get(self, deadline: float) -> tuple[int, JoinMessage | _Lost] | None:
        """The next message, or None when the deadline passes first."""
        try:
            return self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _came(self, rank: int, payload: memoryview) -> None:
        try:
            message: JoinMessage | _Lost = decode_message(payload)
        except msgspec.DecodeError as error:
            message = _Lost(f"a message that cannot be read: {error}")
        self._arrived.put((rank, message))

    def _ended(self, rank: int, end: LinkEnd) -> None:
        self._arrived.put((rank, _Lost(end.detail)))


def join_as_leader(
    leader: JoinLeader,
    links: Mapping[int, RecordLink],
    inbox: JoinInbox,
    apply: ApplyVerdicts,
    *,
    timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
) -> Finished:
    """Join as rank zero; what was agreed.

    Raises:
        ConfigurationMismatch: settings differ between ranks; names fields, values and ranks.
        UsageError: the loss guard stopped it, or a rank failed, was lost, or did not answer in time.
    """
    run = JoinRun(links, apply, leader.applied, leader.failed, time.monotonic() + timeout_seconds)
    finished = run.perform(leader.start())
    while finished is None:
        arrived = inbox.get(run.deadline)
        if arrived is None:
            ranks, what = leader.awaited()
            finished = run.perform(leader.lost(min(ranks), f"ranks {ranks} did not {what} in {timeout_seconds:g} s"))
            continue
        rank, message = arrived
        effects = leader.lost(rank, message.reason) if isinstance(message, _Lost) else leader.receive(rank, message)
        finished = run.perform(effects)
    return finished


def join_as_peer(
    peer: JoinPeer,
    link: RecordLink,
    inbox: JoinInbox,
    apply: ApplyVerdicts,
    *,
    timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
) -> Finished:
    """Join as a peer; raises as :func:`join_as_leader` does."""
    run = JoinRun({0: link}, apply, peer.applied, peer.failed, time.monotonic() + timeout_seconds)
    finished = run.perform(peer.start())
    while finished is None:
        arrived = inbox.get(run.deadline)
        message = _Lost(f"no answer in {timeout_seconds:g} s") if arrived is None else arrived[1]
        effects = peer.lost(message.reason) if isinstance(message, _Lost) else peer.receive(message)
        finished = run.perform(effects)
    return finished


@dataclass(frozen=True, slots=True)
class JoinRun:
    """What a join's effects are performed with; ``applied`` and ``failed`` are the machine's."""

    links: Mapping[int, RecordLink]
    apply: ApplyVerdicts
    applied: Callable[[Applied], list[JoinEffect]]
    failed: Callable[[str], list[JoinEffect]]
    deadline: float

    def perform(self, effects: list[JoinEffect]) -> Finished | None:
        """Perform them in order; what was agreed, once it is. Raises what the join failed with."""
        finished = None
        for effect in effects:
            match effect:
                case Tell(rank, message):
                    self._tell(rank, message)
                case ApplyHere():
                    finished = self.perform(self._apply(effect)) or finished
                case Finished():
                    finished = effect
                case JoinFailed(error):
                    raise error
        return finished

    def _apply(self, effect: ApplyHere) -> list[JoinEffect]:
        try:
            applied = self.apply(effect)
            failpoint("join.applied")
            return self.applied(applied)
        except (FlareError, OSError) as error:
            return self.failed(str(error))

    def _tell(self, rank: int, message: JoinMessage) -> None:
        point = _TELL_POINTS.get(type(message))
        if point is not None:
            failpoint(point)
        payload = encode_message(message)
        while True:
            try:
                self.links[rank].send(RECORD_JOIN, payload)
            except QueueFull:
                # A long scan may be more than the queue holds; the other side reads as fast as it can.
                if time.monotonic() < self.deadline:
                    time.sleep(_RETRY_SECONDS)
                    continue
            except TransportError:
                # The link has ended; its end is in the inbox, with the reason.
                pass
            return
