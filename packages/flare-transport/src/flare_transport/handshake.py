"""The rendezvous handshake, both roles, without I/O, clock or randomness: nonces and ids come from the caller.

Owns what may follow what (the two tables) and every check. A machine knows neither the socket it speaks over nor who
else has joined: rank zero's shell decides about duplicates once a peer is `Proven`.

    peer                              rank zero
    HELLO (rank, nonce, certificate)  ->
                                      <-  WELCOME (run id, nonce, certificate, MAC "srv")
    PROOF (MAC "cli")                 ->
                                      <-  ACCEPT, or REFUSE with a reason
Afterwards both start TLS with exactly the certificates just authenticated, or go on in plaintext if both were told to.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from flare_transport.errors import LocalProtocolError, RemoteProtocolError, VersionMismatchError
from flare_transport.frame_types import ACCEPT, HELLO, PROOF, REFUSE, WELCOME, by_code
from flare_transport.framing import Frame, FrameDecoder, FrameType, encode_frame
from flare_transport.handshake_messages import (
    PROTOCOL_VERSIONS,
    Hello,
    Refusal,
    RefusalCode,
    Security,
    Welcome,
    certificate_digest,
    decode_hello,
    decode_refusal,
    decode_welcome,
    pack_versions,
    transcript_mac,
    transcript_of,
)
from flare_transport.keys import derive_key

__all__ = [
    "PEER_TABLE",
    "RANK_ZERO_TABLE",
    "HandshakeSettings",
    "HandshakeState",
    "PeerHandshake",
    "Proven",
    "RankZeroHandshake",
    "rendezvous_key",
]


class HandshakeState(Enum):
    """Where a handshake stands; the states of both roles."""

    START = "start"
    WELCOME_DUE = "welcome due"
    ACCEPT_DUE = "accept due"
    HELLO_DUE = "hello due"
    PROOF_DUE = "proof due"
    PROVEN = "proven"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    FAILED = "failed"


_Table: TypeAlias = Mapping[tuple[HandshakeState, FrameType], HandshakeState]

# What each side may receive and the state it leads to if all checks pass. What is absent is a fault of the other side.
PEER_TABLE: _Table = {
    (HandshakeState.WELCOME_DUE, WELCOME): HandshakeState.ACCEPT_DUE,
    (HandshakeState.WELCOME_DUE, REFUSE): HandshakeState.REFUSED,
    (HandshakeState.ACCEPT_DUE, ACCEPT): HandshakeState.ACCEPTED,
    (HandshakeState.ACCEPT_DUE, REFUSE): HandshakeState.REFUSED,
}
RANK_ZERO_TABLE: _Table = {
    (HandshakeState.HELLO_DUE, HELLO): HandshakeState.PROOF_DUE,
    (HandshakeState.PROOF_DUE, PROOF): HandshakeState.PROVEN,
    (HandshakeState.PROOF_DUE, REFUSE): HandshakeState.REFUSED,
}


@dataclass(frozen=True, slots=True)
class Proven:
    """What a finished handshake established about the other side."""

    run_id: bytes
    rank: int
    certificate: bytes

    @property
    def certificate_digest(self) -> bytes:
        """SHA-256 of the other side's certificate, as the MACs covered it."""
        return certificate_digest(self.certificate)


@dataclass(frozen=True, slots=True)
class HandshakeSettings:
    """What one side brings. `nonce` is 32 fresh random bytes; `certificate` is DER, empty where links are plaintext."""

    key: bytes
    world_size: int
    security: Security
    nonce: bytes
    certificate: bytes
    versions: tuple[int, int] = PROTOCOL_VERSIONS


class PeerHandshake:
    """The peer's side. `start()` gives the first bytes; `receive(data)` gives the bytes to send back.

    Ends with `outcome` set to `Proven` (rank zero holds the key and accepted) or `Refusal` (by either side).
    """

    def __init__(self, settings: HandshakeSettings, rank: int) -> None:
        self._settings = settings
        self._hello = Hello(
            settings.versions,
            settings.security,
            rank,
            settings.world_size,
            settings.nonce,
            settings.certificate,
        )
        self._decoder = FrameDecoder(by_code(WELCOME, ACCEPT, REFUSE))
        self._welcome: Welcome | None = None
        self.state = HandshakeState.START
        self.outcome: Proven | Refusal | None = None

    @property
    def num_bytes_wanted(self) -> int:
        """How many bytes to read next, so that none of what follows the handshake is taken."""
        return self._decoder.num_bytes_wanted

    def start(self) -> bytes:
        """Return the bytes to send first."""
        if self.state is not HandshakeState.START:
            raise LocalProtocolError("this handshake was started before")
        self.state = HandshakeState.WELCOME_DUE
        return encode_frame(HELLO, self._hello.encode())

    def receive(self, data: bytes) -> bytes:
        """Take bytes of rank zero; raises `RemoteProtocolError`, after which the handshake has failed for good."""
        try:
            return b"".join([self._step(frame) for frame in self._decoder.receive(data)])
        except RemoteProtocolError:
            self.state = HandshakeState.FAILED
            raise

    def _step(self, frame: Frame) -> bytes:
        following = _next_state(PEER_TABLE, self.state, frame.type)
        if frame.type == WELCOME:
            return self._answer(decode_welcome(frame.payload), following)
        if frame.type == REFUSE:
            self.outcome = decode_refusal(frame.payload)
        elif self._welcome is not None:
            self.outcome = Proven(self._welcome.run_id, 0, self._welcome.certificate)
        self.state = following
        return b""

    def _answer(self, welcome: Welcome, following: HandshakeState) -> bytes:
        transcript = transcript_of(self._hello, welcome)
        key = rendezvous_key(self._settings.key)
        if not hmac.compare_digest(welcome.mac, transcript_mac(key, b"srv", transcript)):
            return self._refuse(Refusal(RefusalCode.WRONG_KEY))
        # Past this point rank zero holds the key, so that a disagreement is a fault of its program, not an attack.
        if welcome.security is not self._settings.security:
            raise RemoteProtocolError("rank zero welcomed a peer of another link security")
        lowest, highest = self._settings.versions
        if not lowest <= welcome.version <= highest:
            raise RemoteProtocolError(f"rank zero chose protocol version {welcome.version}, which was not offered")
        self._welcome = welcome
        self.state = following
        return encode_frame(PROOF, transcript_mac(key, b"cli", transcript))

    def _refuse(self, refusal: Refusal) -> bytes:
        self.state = HandshakeState.REFUSED
        self.outcome = refusal
        return encode_frame(REFUSE, refusal.encode())


class RankZeroHandshake:
    """Rank zero's side of one connection. `receive(data)` gives the bytes to send back.

    When `outcome` is `Proven` the shell must call `accept()` or `refuse(code)` and send what they return.
    """

    def __init__(self, settings: HandshakeSettings, run_id: bytes) -> None:
        self._settings = settings
        self._run_id = run_id
        self._decoder = FrameDecoder(by_code(HELLO, PROOF, REFUSE))
        self._hello: Hello | None = None
        self._transcript = b""
        self.state = HandshakeState.HELLO_DUE
        self.outcome: Proven | Refusal | None = None

    @property
    def num_bytes_wanted(self) -> int:
        """How many bytes to read next, so that none of what follows the handshake is taken."""
        return self._decoder.num_bytes_wanted

    def receive(self, data: bytes) -> bytes:
        """Take bytes of the peer; raises `RemoteProtocolError`, after which the handshake has failed for good."""
        try:
            return b"".join([self._step(frame) for frame in self._decoder.receive(data)])
        except VersionMismatchError as mismatch:
            expected, received = mismatch.expected, mismatch.received
            return self._refuse(
                Refusal(RefusalCode.VERSION, pack_versions((expected, expected)), pack_versions((received, received)))
            )
        except RemoteProtocolError:
            self.state = HandshakeState.FAILED
            raise

    def accept(self) -> bytes:
        """Let the proven peer in; returns the bytes to send."""
        self._require_proven()
        self.state = HandshakeState.ACCEPTED
        return encode_frame(ACCEPT)

    def refuse(self, refusal: Refusal) -> bytes:
        """Turn the proven peer away; returns the bytes to send."""
        self._require_proven()
        return self._refuse(refusal)

    def _require_proven(self) -> None:
        if self.state is not HandshakeState.PROVEN:
            raise LocalProtocolError(f"a handshake in state '{self.state.value}' can be neither accepted nor refused")

    def _step(self, frame: Frame) -> bytes:
        following = _next_state(RANK_ZERO_TABLE, self.state, frame.type)
        if frame.type == HELLO:
            return self._greet(decode_hello(frame.payload), following)
        if frame.type == REFUSE:
            self.outcome = decode_refusal(frame.payload)
        elif self._hello is not None:
            expected = transcript_mac(rendezvous_key(self._settings.key), b"cli", self._transcript)
            if not hmac.compare_digest(bytes(frame.payload), expected):
                return self._refuse(Refusal(RefusalCode.WRONG_KEY))
            self.outcome = Proven(self._run_id, self._hello.rank, self._hello.certificate)
        self.state = following
        return b""

    def _greet(self, hello: Hello, following: HandshakeState) -> bytes:
        refusal = self._objection(hello)
        if refusal is not None:
            return self._refuse(refusal)
        unsigned = Welcome(
            min(hello.versions[1], self._settings.versions[1]),
            self._settings.versions,
            self._settings.security,
            self._run_id,
            self._settings.nonce,
            b"",
            self._settings.certificate,
        )
        self._transcript = transcript_of(hello, unsigned)
        mac = transcript_mac(rendezvous_key(self._settings.key), b"srv", self._transcript)
        self._hello = hello
        self.state = following
        return encode_frame(WELCOME, replace(unsigned, mac=mac).encode())

    def _objection(self, hello: Hello) -> Refusal | None:
        ours, theirs = self._settings.versions, hello.versions
        if max(ours[0], theirs[0]) > min(ours[1], theirs[1]):
            return Refusal(RefusalCode.VERSION, pack_versions(ours), pack_versions(theirs))
        if hello.security is not self._settings.security:
            return Refusal(RefusalCode.SECURITY, self._settings.security, hello.security)
        if hello.world_size != self._settings.world_size:
            return Refusal(RefusalCode.WORLD_SIZE, self._settings.world_size, hello.world_size)
        if not 0 < hello.rank < self._settings.world_size:
            return Refusal(RefusalCode.RANK, self._settings.world_size - 1, hello.rank)
        return None

    def _refuse(self, refusal: Refusal) -> bytes:
        self.state = HandshakeState.REFUSED
        self.outcome = refusal
        return encode_frame(REFUSE, refusal.encode())


def rendezvous_key(cluster_key: bytes) -> bytes:
    """Return the key of the rendezvous MACs."""
    return derive_key(cluster_key, "flare/1/rendezvous")


def _next_state(table: _Table, state: HandshakeState, frame_type: FrameType) -> HandshakeState:
    following = table.get((state, frame_type))
    if following is None:
        raise RemoteProtocolError(f"a {frame_type.name} frame came while the handshake was in state '{state.value}'")
    return following
