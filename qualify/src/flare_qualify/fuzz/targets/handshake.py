"""The rendezvous handshake under an attacker without the key who hears everything and may send anything.

The attacker sits between two honest pairs, passes messages on to whom it likes, as often as it likes, changed or not,
and makes up its own. Passing everything on unchanged is allowed and leads to a proof: of the honest side, with its
certificate. So the rule is: whoever is proven is honest, and what it showed is its own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require
from flare_transport import FrameDecoder, RemoteProtocolError, Security, encode_frame
from flare_transport.frame_types import ACCEPT, ALL_FRAME_TYPES, HELLO, MAX_CERTIFICATE_BYTES, PROOF, REFUSE, WELCOME
from flare_transport.frame_types import by_code as types_by_code
from flare_transport.framing import Frame, FrameType
from flare_transport.handshake import HandshakeSettings, PeerHandshake, Proven, RankZeroHandshake
from flare_transport.handshake_messages import (
    Refusal,
    RefusalCode,
    decode_hello,
    decode_welcome,
    transcript_mac,
)

__all__ = ["HANDSHAKE"]

_KEY = hashlib.sha256(b"the cluster key, which the attacker does not have").digest()
_WRONG_KEY = hashlib.sha256(b"the attacker's guess").digest()
_WORLD_SIZE = 4
_LARGEST = 16 + WELCOME.max_bytes
_ATTACKERS = (b"", b"the attacker's certificate", b"c" * MAX_CERTIFICATE_BYTES)
_TYPES = types_by_code(*ALL_FRAME_TYPES)


def _bytes(name: str, num_bytes: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(num_bytes)


def _settings(name: str) -> HandshakeSettings:
    certificate = b"certificate of " + name.encode()
    return HandshakeSettings(_KEY, _WORLD_SIZE, Security.TLS, _bytes(name, 32), certificate)


@dataclass(slots=True)
class _Side:
    """One honest process: its machine, what it is known by, and whether it still answers."""

    name: str
    rank: int
    machine: PeerHandshake | RankZeroHandshake
    certificate: bytes
    is_open: bool = True

    def receive(self, data: bytes) -> bytes:
        """What the process answers to ``data``; it hangs up at a fault, as its shell does."""
        if not self.is_open:
            return b""
        try:
            answer = self.machine.receive(data)
        except RemoteProtocolError:
            self.is_open = False
            return b""
        require(len(answer) <= _LARGEST, f"{self.name} answered {len(answer)} bytes")
        require(self.machine.num_bytes_wanted <= _LARGEST, f"{self.name} waits for more than a message")
        if isinstance(self.machine, RankZeroHandshake) and isinstance(self.machine.outcome, Proven):
            answer += self.machine.accept()
            self.is_open = False
        return answer


def _world() -> list[_Side]:
    sides: list[_Side] = []
    for number in (1, 2):
        peer, zero = _settings(f"peer {number}"), _settings(f"rank zero {number}")
        sides.append(_Side(f"peer {number}", number, PeerHandshake(peer, number), peer.certificate))
        machine = RankZeroHandshake(zero, _bytes(f"run {number}", 16))
        sides.append(_Side(f"rank zero {number}", 0, machine, zero.certificate))
    return sides


def _frames(data: bytes) -> list[Frame]:
    """Whole frames in what an honest side said."""
    return list(FrameDecoder(_TYPES).receive(data))


def _changed(frame: Frame, choices: Choices) -> bytes:
    """A message with one field that is the attacker's."""
    payload = bytes(frame.payload)
    if frame.type == HELLO:
        hello = decode_hello(payload)
        change = choices.pick(
            (
                {"rank": choices.integer(0, 5)},
                {"nonce": choices.take(32).ljust(32, b"n")},
                {"certificate": choices.pick(_ATTACKERS)},
                {"world_size": choices.integer(0, 5)},
                {"versions": (choices.integer(0, 2), choices.integer(0, 3))},
                {"security": choices.pick(tuple(Security))},
            )
        )
        return encode_frame(HELLO, replace(hello, **change).encode())  # type: ignore[arg-type]
    if frame.type == WELCOME:
        welcome = decode_welcome(payload)
        change = choices.pick(
            (
                {"run_id": choices.take(16).ljust(16, b"r")},
                {"nonce": choices.take(32).ljust(32, b"n")},
                {"certificate": choices.pick(_ATTACKERS)},
                {"mac": transcript_mac(_WRONG_KEY, b"srv", payload)},
                {"version": choices.integer(0, 3)},
                {"security": choices.pick(tuple(Security))},
            )
        )
        return encode_frame(WELCOME, replace(welcome, **change).encode())  # type: ignore[arg-type]
    at = choices.integer(0, max(0, len(payload) - 1))
    changed = payload[:at] + choices.take(4) + payload[at + 4 :]
    return encode_frame(frame.type, changed[: frame.type.max_bytes])


def _made_up(choices: Choices, heard: Sequence[Frame]) -> bytes:
    """A message of the attacker's own, of any type; a MAC that it heard serves as proof (reflection, replay)."""
    frame_type: FrameType = choices.pick((HELLO, WELCOME, PROOF, ACCEPT, REFUSE))
    macs = [decode_welcome(bytes(frame.payload)).mac for frame in heard if frame.type == WELCOME]
    macs += [bytes(frame.payload) for frame in heard if frame.type == PROOF]
    if frame_type == PROOF and macs:
        return encode_frame(PROOF, choices.pick(macs))
    if frame_type == REFUSE:
        return encode_frame(REFUSE, Refusal(choices.pick(tuple(RefusalCode)), 1, 2).encode())
    return encode_frame(frame_type, choices.piece(min(frame_type.max_bytes, 200)))


def _check(sides: Sequence[_Side]) -> None:
    certificates = {side.certificate: side for side in sides}
    for side in sides:
        outcome = side.machine.outcome
        if not isinstance(outcome, Proven):
            continue
        shown = certificates.get(outcome.certificate)
        if shown is None:
            require(False, f"{side.name} took a certificate that no honest side has")
            return
        require(outcome.rank == shown.rank, f"{side.name} took rank {outcome.rank} from {shown.name}")
        require(
            isinstance(shown.machine, PeerHandshake) is not isinstance(side.machine, PeerHandshake),
            f"{side.name} took {shown.name}, which has its own role",
        )


def _execute(data: bytes) -> None:
    choices = Choices(data)
    sides = _world()
    heard: list[Frame] = []
    for side in sides:
        if isinstance(side.machine, PeerHandshake):
            heard += _frames(side.machine.start())
    for _ in range(24):
        if choices.is_spent:
            break
        side = choices.pick(sides)
        way = choices.integer(0, 4)
        if way <= 1:
            frame = choices.pick(heard)
            message = encode_frame(frame.type, frame.payload)
        elif way == 2:
            message = _changed(choices.pick(heard), choices)
        elif way == 3:
            message = _made_up(choices, heard)
        else:
            message = choices.piece(60)
        if choices.integer(0, 7) == 7:
            message = message[: choices.integer(0, len(message))]
        heard += _frames(side.receive(message))
        _check(sides)


@contextlib.contextmanager
def _open() -> Iterator[Execute]:
    yield _execute


def _seeds() -> Iterator[bytes]:
    # An honest run of pair 1: HELLO (heard first) to rank zero 1, its WELCOME to peer 1, PROOF back, ACCEPT on.
    yield bytes((1, 0, 0, 0, 0, 0, 2, 0, 1, 0, 3, 0, 0, 0, 4, 0))
    # The same with peer 2's HELLO, then a changed WELCOME, a made-up PROOF and garbage.
    yield bytes((1, 0, 1, 0, 2, 2, 2, 2, 0, 1, 3, 2, 0, 0, 3, 4, 8)) + bytes(range(40))
    yield b"\x01\x03\x00\x20" + b"h" * 60 + b"\x00\x03\x01\x40" + b"w" * 80
    yield bytes(range(100))


HANDSHAKE = Target(
    "handshake",
    "Without the cluster key nobody is proven but honest sides with their own rank, role and certificate.",
    _open,
    _seeds,
    words=(b"\x01\x00\x00", b"\x00\x00\x02", b"\x01\x02", b"\x00\x03\x02"),
)
