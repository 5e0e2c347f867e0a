"""What can go wrong on one direction of a connection, as a pure machine: bytes in, effects out.

Knows no socket and no thread; the proxy carries the effects out. Positions count bytes from the moment a fault is
armed, and a fault fires where the first byte beyond its position would pass.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = [
    "Bandwidth",
    "BlackHole",
    "Close",
    "Cut",
    "Delay",
    "Duplicate",
    "Effect",
    "Flip",
    "Hold",
    "Line",
    "LineFault",
    "Pause",
    "Send",
    "SlowClose",
    "Stall",
    "Swap",
]

_SLICES_PER_SECOND = 20


class Close(enum.StrEnum):
    """How a connection is cut: with a reset, or as if the other side had closed it."""

    RESET = "reset"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Delay:
    """Every piece that passes is held back for ``seconds``."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """At most ``bytes_per_second`` pass; the sender's buffers fill up."""

    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Behind byte ``at`` nothing passes and nothing is read, until the fault is healed; then everything arrives."""

    at: int = 0


@dataclass(frozen=True, slots=True)
class BlackHole:
    """Behind byte ``at`` everything is read, acknowledged by the kernel, and lost."""

    at: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """Both connections end once ``at`` bytes have passed."""

    at: int = 0
    how: Close = Close.RESET


@dataclass(frozen=True, slots=True)
class Flip:
    """Byte ``at`` arrives with the bits of ``mask`` inverted."""

    at: int = 0
    mask: int = 1


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The ``size`` bytes from ``at`` on arrive twice."""

    at: int = 0
    size: int = 64


@dataclass(frozen=True, slots=True)
class Swap:
    """The ``size`` bytes from ``at`` on arrive behind the ``size`` bytes that follow them."""

    at: int = 0
    size: int = 64


@dataclass(frozen=True, slots=True)
class SlowClose:
    """The end of the stream arrives ``seconds`` late."""

    seconds: float


LineFault = Delay | Bandwidth | Stall | BlackHole | Cut | Flip | Duplicate | Swap | SlowClose


@dataclass(frozen=True, slots=True)
class Send:
    """Pass these bytes on."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next effect."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait until the line is healed."""


Effect = Send | Pause | Hold | Close


@dataclass(slots=True)
class Line:
    """One direction of one connection. ``fired`` says what the armed faults have done so far, in words."""

    fault: LineFault | None = None
    num_bytes: int = 0
    fired: list[str] = field(default_factory=list)
    _has_fired: bool = False
    _kept: bytes = b""

    def arm(self, fault: LineFault | None) -> None:
        """From now on ``fault`` applies, its positions counted from here; None heals the line."""
        self.fault, self.num_bytes, self._has_fired = fault, 0, False

    def release(self) -> bytes:
        """What a swap still holds back; to be sent when the stream ends or the line is healed."""
        kept, self._kept = self._kept, b""
        return kept

    def carry(self, data: bytes) -> list[Effect]:
        """``data`` came; what is to be done, in order."""
        start, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
        match self.fault:
            case None | SlowClose():
                return [Send(data)]
            case Delay(seconds):
                self._fire(f"delayed by {seconds:g} s")
                return [Pause(seconds), Send(data)]
            case Bandwidth(rate):
                return self._slow(data, rate)
            case Swap(at, size):
                return self._swap(data, at - start, size)
            case fault:
                at = fault.at - start
                return [Send(data)] if at >= len(data) else self._strike(data, max(0, at), fault)

    def finish(self) -> list[Effect]:
        """The stream ended; what is to be done before that is passed on."""
        if isinstance(self.fault, SlowClose):
            self._fire(f"closed {self.fault.seconds:g} s late")
            return [Pause(self.fault.seconds)]
        return []

    def _strike(self, data: bytes, at: int, fault: Stall | BlackHole | Cut | Flip | Duplicate) -> list[Effect]:
        before, rest = data[:at], data[at:]
        sent: list[Effect] = [Send(before)] if before else []
        if self._has_fired and isinstance(fault, Flip | Duplicate):
            return [Send(data)]
        match fault:
            case Stall():
                self._fire(f"stalled behind byte {fault.at}")
                return [*sent, Hold(), Send(rest)]
            case BlackHole():
                self._fire(f"lost everything behind byte {fault.at}")
                return sent
            case Cut(how=how):
                self._fire(f"cut behind byte {fault.at} ({how})")
                return [*sent, how]
            case Flip(mask=mask):
                self._fire(f"flipped bits {mask:#04x} of byte {fault.at}")
                return [*sent, Send(bytes((rest[0] ^ mask,)) + rest[1:])]
            case Duplicate(size=size):
                self._fire(f"sent {len(rest[:size])} bytes from {fault.at} on twice")
                return [*sent, Send(rest[:size] + rest)]

    def _swap(self, data: bytes, at: int, size: int) -> list[Effect]:
        if self._has_fired or at >= len(data):
            return [Send(data)]
        at = max(0, at)
        passed = data[: 0 if self._kept else at]
        pool = self._kept + data[len(passed) :]
        if len(pool) < 2 * size:
            self._kept = pool
            return [Send(passed)] if passed else []
        self._kept = b""
        self._fire(f"swapped two slices of {size} bytes")
        return [Send(passed + pool[size : 2 * size] + pool[:size] + pool[2 * size :])]

    def _slow(self, data: bytes, rate: int) -> list[Effect]:
        size = max(1, rate // _SLICES_PER_SECOND)
        effects: list[Effect] = []
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            effects += [Pause(len(piece) / rate), Send(piece)]
        self._fire(f"held to {rate} bytes a second")
        return effects

    def _fire(self, what: str) -> None:
        if not self._has_fired:
            self._has_fired = True
            self.fired.append(what)
