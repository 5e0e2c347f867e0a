"""Simulated links: frames as bytes, delivered in order, late, in pieces, cut at any byte, or not at all.

An end is what ``flare_transport.link.Link`` is to its users, made of the same framing, router and liveness; only socket
and thread are simulated. What frames mean is not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, cast

from flare_cache.record_link import RECORD_ACK, RECORD_JOB, RECORD_STARTED
from flare_qualify.sim.loop import EventLoop
from flare_transport.errors import LinkLost, RemoteProtocolError
from flare_transport.frame_types import BYE, HEARTBEAT
from flare_transport.framing import Buffer, Frame, FrameDecoder, FrameType, encode_frame
from flare_transport.liveness import HeartbeatSettings, Liveness
from flare_transport.router import EndCause, LinkEnd, Router

if TYPE_CHECKING:
    from flare_transport.link import Link

__all__ = ["SimLink", "Wire", "connect"]

_HEARTBEAT = HeartbeatSettings()
_SPLIT_ABOVE = 48
_JOB_CODES = {RECORD_JOB.code, RECORD_STARTED.code, RECORD_ACK.code}

After = Callable[[float, str, Callable[[], None]], None]


@dataclass(slots=True)
class Wire:
    """One direction.

    Attributes:
        latency: seconds, at least; ``jitter`` is added in part.
        stalled_until: nothing arrives before.
        cut_after: bytes that still get through before the connection breaks; None: all.
    """

    latency: float
    jitter: float
    stalled_until: float = 0.0
    cut_after: int | None = None
    last_arrival: float = 0.0
    in_flight: deque[bytes | None] = field(default_factory=deque)


@dataclass(slots=True)
class SimLink:
    """One end. ``after`` schedules in the process's own time: nothing once it is dead, later while it is frozen."""

    name: str
    loop: EventLoop
    rng: Random
    after: After
    outgoing: Wire
    split_rate: float
    other: SimLink | None = None
    end: LinkEnd | None = None
    watch: Callable[[FrameType, bytes], None] | None = None
    is_open: bool = False
    sent: list[bytes] = field(default_factory=list)
    _router: Router | None = None
    _decoder: FrameDecoder | None = None
    _liveness: Liveness | None = None
    _pulse: Callable[[], bytes | None] | None = None
    _early: deque[bytes | None] = field(default_factory=deque)
    _is_shut: bool = False
    _is_given_up: bool = False
    _is_closed_out: bool = False

    @property
    def label(self) -> str:
        """What the log calls an arrival."""
        return f"{self.name} receives"

    def _has_ended(self) -> bool:
        return self.end is not None

    def start(self, router: Router, *, pulse: Callable[[], bytes | None]) -> None:
        """Begin to deliver to ``router``, and to send heartbeats."""
        self._router = router
        self._decoder = FrameDecoder(router.types)
        self._pulse = pulse
        self._liveness = Liveness(_HEARTBEAT, self.loop.now)
        self.is_open = True
        self._beat()
        while self._early:
            self._arrive(self._early.popleft())

    def send(self, frame_type: FrameType, payload: Buffer = b"") -> None:
        """Put a frame on the wire. Raises LinkLost when the link has ended or is shutting down."""
        if self.end is not None or self._is_shut or self._is_given_up:
            raise LinkLost(self.end.detail if self.end is not None else f"{self.name} is shutting down")
        if self.watch is not None:
            self.watch(frame_type, bytes(payload))
        data = encode_frame(frame_type, payload)
        if frame_type.code in _JOB_CODES:
            self.sent.append(data)
        self.put(data)

    def flush(self) -> None:
        """What a stall held back arrives now."""
        other = self.other
        if other is not None:
            for _ in self.outgoing.in_flight:
                other.after(0.0, other.label, other.receive)

    def put(self, data: bytes) -> None:
        """Put bytes on the wire, in one or two pieces."""
        wire = self.outgoing
        if wire.cut_after is not None:
            is_cut = len(data) >= wire.cut_after
            data = data[: wire.cut_after]
            wire.cut_after -= len(data)
            if is_cut:
                self._transmit(data)
                self._close_out()
                self.after(wire.latency, f"{self.name} broken", lambda: self._finish(EndCause.DISCONNECTED, "it broke"))
                return
        if len(data) > _SPLIT_ABOVE and self.rng.random() < self.split_rate:
            at = self.rng.randrange(1, len(data))
            self._transmit(data[:at])
            self._transmit(data[at:])
        else:
            self._transmit(data)

    def _close_out(self) -> None:
        if not self._is_closed_out:
            self._transmit(None)
            self._is_closed_out = True

    def _transmit(self, data: bytes | None) -> None:
        """``None`` is the end of the stream."""
        other, wire = self.other, self.outgoing
        if other is None or self._is_closed_out:
            return
        wire.in_flight.append(data)
        at = max(self.loop.now + wire.latency + wire.jitter * self.rng.random(), wire.last_arrival)
        wire.last_arrival = at
        other.after(at - self.loop.now, other.label, other.receive)

    def receive(self) -> None:
        """Something has arrived, unless the wire is stalled; what was sent first comes first."""
        other = self.other
        if other is None:
            return
        wire = other.outgoing
        wait = wire.stalled_until - self.loop.now
        if wait > 0:
            self.after(wait, self.label, self.receive)
        elif wire.in_flight:
            self.take(wire.in_flight.popleft())

    def take(self, data: bytes | None) -> None:
        """Bytes have arrived; ``None``: the other side has closed."""
        if self._router is None:
            self._early.append(data)
        else:
            self._arrive(data)

    def _arrive(self, data: bytes | None) -> None:
        decoder = self._decoder
        if self.end is not None or decoder is None:
            return
        try:
            if data is None:
                decoder.receive_eof()
                self._finish(EndCause.DISCONNECTED, "the other side vanished (connection closed without BYE)")
                return
            for frame in decoder.receive(data):
                self._deliver(frame)
                if self._has_ended():
                    return
        except RemoteProtocolError as error:
            cause = EndCause.DISCONNECTED if data is None else EndCause.PROTOCOL
            self._finish(cause, str(error))

    def _deliver(self, frame: Frame) -> None:
        if frame.type == BYE:
            self._finish(EndCause.CLOSED_BY_PEER if not self._is_shut else EndCause.CLOSED_HERE, "was shut down")
            return
        if frame.type == HEARTBEAT and self._liveness is not None:
            self._liveness.heard(self.loop.now)
        if self._router is not None:
            self._router.deliver(cast("Link", self), frame)

    def _beat(self) -> None:
        liveness, pulse = self._liveness, self._pulse
        if self.end is not None or liveness is None or pulse is None or self._is_shut:
            return
        now = self.loop.now
        if liveness.is_dead(now):
            self._finish(EndCause.SILENT, f"no heartbeat for {_HEARTBEAT.deadline_seconds:g} s")
            return
        if liveness.is_due(now):
            liveness.sent(now)
            payload = pulse()
            if payload is not None:
                self.put(encode_frame(HEARTBEAT, payload))
        self.after(max(0.0, liveness.next_timer() - now), f"{self.name} timer", self._beat)

    def shutdown(self) -> None:
        """End in order: the last frame is BYE, and the other side's ends it here."""
        if self.end is None and not self._is_shut:
            self._is_shut = True
            self.put(encode_frame(BYE))
            self.after(5.0, f"{self.name} drained", lambda: self._finish(EndCause.CLOSED_HERE, "was shut down"))

    def fail(self, reason: str) -> None:
        """Give the link up; its end is told by an event of its own."""
        self._is_given_up = True
        self.after(0.0, f"{self.name} fails", lambda: self._finish(EndCause.FAILED_HERE, reason))

    def close_silently(self) -> None:
        """The process is gone; the kernel closes its connections."""
        if self.end is None:
            self.end = LinkEnd(EndCause.CLOSED_HERE, "the process ended")
            self._close_out()

    def _finish(self, cause: EndCause, detail: str) -> None:
        if self.end is not None:
            return
        self.end = LinkEnd(cause, f"{self.name}: {detail}")
        self.loop.note(f"{self.name} ended: {cause.value}")
        self._close_out()
        if self._router is not None:
            self._router.ended(cast("Link", self), self.end)


def connect(
    names: tuple[str, str], loop: EventLoop, rng: Random, *, after: tuple[After, After], wires: tuple[Wire, Wire],
    split_rate: float,
) -> tuple[SimLink, SimLink]:  # fmt: skip
    """The two ends of a connection."""
    here = SimLink(names[0], loop, rng, after[0], wires[0], split_rate)
    there = SimLink(names[1], loop, rng, after[1], wires[1], split_rate)
    here.other, there.other = there, here
    return here, there
