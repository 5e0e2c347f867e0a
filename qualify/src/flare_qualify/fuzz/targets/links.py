"""Started links with the receivers that a rank really has on them, and a compromised rank at the other end."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

from flare_cache.dispatcher import Dispatcher
from flare_cache.jobs import Job
from flare_cache.join_shell import JoinInbox
from flare_cache.outcomes import ShardedLimits
from flare_cache.peer_service import PeerService
from flare_cache.record_link import RECORD_ACK, RECORD_JOB, RECORD_JOIN, RECORD_STARTED
from flare_cache.sharded import ShardedLeader
from flare_cli.control_group import CALLED_OFF, DRAIN_ASKED, OFFER, PLAN, ControlGroup
from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require
from flare_qualify.fuzz.targets.messages import odd_message
from flare_qualify.fuzz.targets.samples import RUN_ID, WIRES
from flare_transport import (
    HEARTBEAT,
    EndCause,
    FrameType,
    Group,
    Link,
    Peer,
    PeerIdentity,
    Router,
    Security,
    Session,
    encode_frame,
)
from flare_transport.frame_types import BYE, EXCHANGE_PART, EXCHANGE_WHOLE, KEY_VALUE_REPLY, KEY_VALUE_REQUEST

__all__ = ["LINKS"]

_SECONDS = 5.0
_CONTROL = (KEY_VALUE_REQUEST, KEY_VALUE_REPLY, EXCHANGE_PART, EXCHANGE_WHOLE, PLAN, OFFER, CALLED_OFF, DRAIN_ASKED)
_RECORDS = (RECORD_JOB, RECORD_STARTED, RECORD_ACK, RECORD_JOIN)
_WIRES = {
    KEY_VALUE_REQUEST: "key-value request",
    KEY_VALUE_REPLY: "key-value reply",
    OFFER: "link offer",
    PLAN: "plan",
    RECORD_JOB: "job",
    RECORD_STARTED: "started",
    RECORD_ACK: "acknowledgement",
    RECORD_JOIN: "join",
    HEARTBEAT: "progress",
}
_BY_NAME = {wire.name: wire for wire in WIRES}


def _control(rank: int) -> Callable[[Link], None]:
    """A rank's control link as ``ControlGroup`` starts it."""

    def start(link: Link) -> None:
        session = Session(RUN_ID, rank, 2, Security.PLAINTEXT, bytes(32), None)
        identity = PeerIdentity(1 - rank, "127.0.0.1", "127.0.0.1", b"", bytes(32))
        ControlGroup(Group(session, {1 - rank: Peer(identity, link)}), on_loss=lambda _: None)

    return start


def _records_of_rank_zero(link: Link) -> None:
    leader = ShardedLeader(run_id=RUN_ID, world_size=2, limits=ShardedLimits())
    dispatcher = Dispatcher(leader, on_outcome=lambda: None, on_poison=lambda _: None)
    router = Router()
    dispatcher.route(router, 1)
    JoinInbox().route(router, 1)
    link.start(router, pulse=dispatcher.pulse)


class _Transport:
    """Takes jobs and does nothing with them."""

    def submit(self, job: Job) -> None:
        """Every job is taken."""

    def step_finished(self, step: int) -> None:
        """Nothing waits."""

    def wait_for_jobs(self, jobs: object) -> None:
        """All have ended."""

    def close(self, deadline_seconds: float) -> bool:
        """Nothing runs."""
        return deadline_seconds >= 0


def _records_of_a_peer(link: Link) -> None:
    service = PeerService(run_id=RUN_ID, rank=1, on_end=lambda _: None)
    router = Router()
    service.route(router)
    JoinInbox().route(router, 0)
    service.attach(_Transport(), link)
    link.start(router, pulse=service.pulse)


_SIDES = (
    (_control(0), _CONTROL),
    (_control(1), _CONTROL),
    (_records_of_rank_zero, _RECORDS),
    (_records_of_a_peer, _RECORDS),
)


def _stream(choices: Choices, types: tuple[FrameType, ...]) -> bytes:
    parts: list[bytes] = []
    for _ in range(choices.integer(0, 6)):
        frame_type = choices.pick((*types, HEARTBEAT, BYE))
        wire = _BY_NAME.get(_WIRES.get(frame_type, ""))
        if wire is not None and choices.flag():
            payload = odd_message(choices.pick(wire.samples), choices)
        else:
            payload = choices.piece(40)
        parts.append(encode_frame(frame_type, payload[: frame_type.max_bytes]))
    return b"".join(parts)


def _execute(data: bytes) -> None:
    choices = Choices(data)
    start, types = choices.pick(_SIDES)
    near, far = socket.socketpair()
    with far:
        far.settimeout(_SECONDS)
        link = Link(near, name="fuzzed link")
        start(link)
        with contextlib.suppress(ConnectionError):
            far.sendall(_stream(choices, types))
            far.shutdown(socket.SHUT_WR)
            while far.recv(1 << 16):
                pass
        require(link.wait_ended(_SECONDS), "a link whose other side has left goes on")
    end = link.end
    require(end is not None and end.cause is not EndCause.RECEIVER_RAISED, f"a receiver raised: {end}")


@contextlib.contextmanager
def _open() -> Iterator[Execute]:
    loggers = [logging.getLogger(name) for name in ("flare_cache", "flare_transport", "flare")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield _execute
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _seeds() -> Iterator[bytes]:
    for side, (_, types) in enumerate(_SIDES):
        for number in range(len(types) + 1):
            yield bytes((side, 2, number, 1, 0, 3, 0, 1, 0, 0, number, 0, 12)) + bytes(range(12))
            yield bytes((side, 1, number, 0, 20)) + bytes(range(20))
            yield bytes((side, 1, number, 1, 0, 14, 200, 0, 2))


LINKS = Target(
    "links",
    "Whatever a rank sends on a link, the link goes on or ends as a fault of the other side; no receiver raises.",
    _open,
    _seeds,
    max_bytes=600,
)
