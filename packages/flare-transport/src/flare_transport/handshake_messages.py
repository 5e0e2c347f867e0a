"""Payloads of the rendezvous handshake and the transcript that its MACs cover. Knows no state and no socket.

All integers are little-endian; every payload is of fixed layout, a certificate last. Sizes and fields are checked
here, meaning is checked by the machines in `handshake`.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from flare_transport.errors import RemoteProtocolError
from flare_transport.frame_types import MAX_CERTIFICATE_BYTES

__all__ = [
    "DIGEST_BYTES",
    "MAC_BYTES",
    "NONCE_BYTES",
    "PROTOCOL_VERSIONS",
    "RUN_ID_BYTES",
    "Hello",
    "Refusal",
    "RefusalCode",
    "Security",
    "Welcome",
    "certificate_digest",
    "decode_hello",
    "decode_refusal",
    "decode_welcome",
    "pack_versions",
    "transcript_mac",
    "transcript_of",
]

PROTOCOL_VERSIONS = (1, 1)

NONCE_BYTES = 32
RUN_ID_BYTES = 16
MAC_BYTES = 32
DIGEST_BYTES = 32

_HELLO = struct.Struct("<HHBxII32sH")
_WELCOME = struct.Struct("<HHHBx16s32s32sH")
_REFUSAL = struct.Struct("<BxxxII")
_TRANSCRIPT = struct.Struct("<HHHHHBII32s32s16s32s32s")
_TRANSCRIPT_DOMAIN = b"flare/rendezvous/1"


class Security(IntEnum):
    """How a link is protected once the handshake is over."""

    PLAINTEXT = 0
    TLS = 1


class RefusalCode(IntEnum):
    """Why a peer may not join; travels in a REFUSE frame."""

    VERSION = 1
    SECURITY = 2
    WORLD_SIZE = 3
    RANK = 4
    DUPLICATE_RANK = 5
    WRONG_KEY = 6
    INCOMPLETE = 7


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal: its code, what rank zero expected, and what it received from the peer. Reveals nothing secret.

    Versions are packed as `lowest << 16 | highest`.
    """

    code: RefusalCode
    expected: int = 0
    received: int = 0

    def describe(self) -> str:
        """Return the reason for a person, on either side."""
        match self.code:
            case RefusalCode.VERSION:
                return (
                    f"protocol versions do not overlap: rank zero speaks {_version_range(self.expected)}, "
                    f"the peer {_version_range(self.received)}; install the same flare on every host"
                )
            case RefusalCode.SECURITY:
                return (
                    f"rank zero uses {_security_name(self.expected)} and the peer {_security_name(self.received)}; "
                    "give --insecure-plaintext to every rank or to none"
                )
            case RefusalCode.WORLD_SIZE:
                return f"rank zero has --world-size {self.expected}, the peer --world-size {self.received}"
            case RefusalCode.RANK:
                return f"--rank {self.received} is not a peer's rank: those are 1 to {self.expected}"
            case RefusalCode.DUPLICATE_RANK:
                return f"another process has already joined as --rank {self.received}"
            case RefusalCode.WRONG_KEY:
                return "the cluster keys differ: --key-file must hold the same key on every host"
            case RefusalCode.INCOMPLETE:
                return f"rank zero gave up waiting: {self.received} of {self.expected} ranks had come"

    def encode(self) -> bytes:
        """Return the payload of a REFUSE frame."""
        return _REFUSAL.pack(self.code, self.expected, self.received)


@dataclass(frozen=True, slots=True)
class Hello:
    """A peer's first message."""

    versions: tuple[int, int]
    security: Security
    rank: int
    world_size: int
    nonce: bytes
    certificate: bytes

    def encode(self) -> bytes:
        """Return the payload of a HELLO frame."""
        fixed = _HELLO.pack(
            *self.versions, self.security, self.rank, self.world_size, self.nonce, len(self.certificate)
        )
        return fixed + self.certificate


@dataclass(frozen=True, slots=True)
class Welcome:
    """Rank zero's reply. `mac` is its proof, over the transcript, that it holds the cluster key."""

    version: int
    versions: tuple[int, int]
    security: Security
    run_id: bytes
    nonce: bytes
    mac: bytes
    certificate: bytes

    def encode(self) -> bytes:
        """Return the payload of a WELCOME frame."""
        fixed = _WELCOME.pack(
            self.version,
            *self.versions,
            self.security,
            self.run_id,
            self.nonce,
            self.mac,
            len(self.certificate),
        )
        return fixed + self.certificate


def decode_refusal(payload: bytes | memoryview) -> Refusal:
    """Parse a REFUSE payload; raises `RemoteProtocolError`."""
    if len(payload) != _REFUSAL.size:
        raise RemoteProtocolError(f"a REFUSE frame of {len(payload)} bytes; expected {_REFUSAL.size}")
    code, expected, received = _REFUSAL.unpack(payload)
    try:
        return Refusal(RefusalCode(code), expected, received)
    except ValueError:
        raise RemoteProtocolError(f"refused with the unknown reason {code}") from None


def decode_hello(payload: bytes | memoryview) -> Hello:
    """Parse a HELLO payload; raises `RemoteProtocolError`."""
    certificate = _trailing_certificate("HELLO", payload, _HELLO)
    lowest, highest, security, rank, world_size, nonce, _ = _HELLO.unpack_from(payload)
    return Hello((lowest, highest), _security(security), rank, world_size, nonce, certificate)


def decode_welcome(payload: bytes | memoryview) -> Welcome:
    """Parse a WELCOME payload; raises `RemoteProtocolError`."""
    certificate = _trailing_certificate("WELCOME", payload, _WELCOME)
    version, lowest, highest, security, run_id, nonce, mac, _ = _WELCOME.unpack_from(payload)
    return Welcome(version, (lowest, highest), _security(security), run_id, nonce, mac, certificate)


def certificate_digest(certificate: bytes) -> bytes:
    """Return the SHA-256 that stands for a DER certificate; of the empty string where links are plaintext."""
    return hashlib.sha256(certificate).digest()


def transcript_of(hello: Hello, welcome: Welcome) -> bytes:
    """Return the bytes that both MACs cover: every field of both messages but the MAC, certificates by digest."""
    return _TRANSCRIPT_DOMAIN + _TRANSCRIPT.pack(
        *hello.versions,
        welcome.version,
        *welcome.versions,
        (hello.security << 4) | welcome.security,
        hello.rank,
        hello.world_size,
        hello.nonce,
        certificate_digest(hello.certificate),
        welcome.run_id,
        welcome.nonce,
        certificate_digest(welcome.certificate),
    )


def transcript_mac(key: bytes, role: bytes, transcript: bytes) -> bytes:
    """Return one side's proof. `role` is `b"srv"` or `b"cli"`, so that neither side's proof serves as the other's."""
    return hmac.digest(key, role + b"\0" + transcript, "sha256")


def pack_versions(versions: tuple[int, int]) -> int:
    """Pack a version range for a `Refusal`."""
    return versions[0] << 16 | versions[1]


def _version_range(packed: int) -> str:
    lowest, highest = packed >> 16, packed & 0xFFFF
    return str(lowest) if lowest == highest else f"{lowest} to {highest}"


def _security_name(value: int) -> str:
    return "TLS" if value == Security.TLS else "plaintext"


def _security(value: int) -> Security:
    try:
        return Security(value)
    except ValueError:
        raise RemoteProtocolError(f"unknown link security {value}") from None


def _trailing_certificate(name: str, payload: bytes | memoryview, fixed: struct.Struct) -> bytes:
    if len(payload) < fixed.size:
        raise RemoteProtocolError(f"a {name} frame of {len(payload)} bytes; expected at least {fixed.size}")
    # Both layouts end with the length of the certificate.
    length = fixed.unpack_from(payload)[-1]
    certificate = bytes(payload[fixed.size :])
    if length != len(certificate) or length > MAX_CERTIFICATE_BYTES:
        raise RemoteProtocolError(
            f"a {name} frame announces a certificate of {length} bytes and has {len(certificate)}"
        )
    return certificate
