"""Payloads of the handshake between a service and its clients, and what its MACs cover. Knows no state and no socket.

A service is reached by whoever holds its key: the pool's manager is one. All integers are little-endian; every payload
is of fixed layout, a certificate last.
"""

import hmac
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from flare_transport.certificates import Credentials
from flare_transport.errors import RemoteProtocolError
from flare_transport.frame_types import MAX_CERTIFICATE_BYTES
from flare_transport.handshake_messages import Security, certificate_digest
from flare_transport.keys import derive_key

__all__ = [
    "EPOCH_BYTES",
    "SERVICE_VERSIONS",
    "SESSION_ID_BYTES",
    "BulkAccept",
    "BulkHello",
    "ServiceHello",
    "ServiceRefusal",
    "ServiceRefusalCode",
    "ServiceSession",
    "ServiceWelcome",
    "bulk_mac",
    "client_mac",
    "service_mac",
    "session_key",
    "transcript",
]

SERVICE_VERSIONS = (1, 1)
SESSION_ID_BYTES = 16
EPOCH_BYTES = 16

_HELLO = struct.Struct("<HHBx32sH")
_WELCOME = struct.Struct("<HBx16s16s32s32sH")
_REFUSAL = struct.Struct("<BxHHxx")
_BULK_HELLO = struct.Struct("<16s32s")
_BULK_ACCEPT = struct.Struct("<32s32s")
_TRANSCRIPT = struct.Struct("<HHHBB32s32s16s16s32s32s")
_DOMAIN = b"flare/service/1"


class ServiceRefusalCode(IntEnum):
    """Why a client may not come in; travels in a SERVICE_REFUSE frame."""

    VERSION = 1
    SECURITY = 2
    WRONG_KEY = 3
    UNKNOWN_SESSION = 4
    CLOSING = 5


@dataclass(frozen=True, slots=True)
class ServiceRefusal:
    """A refusal, by either side: its code, and what the service speaks (lowest and highest version)."""

    code: ServiceRefusalCode
    versions: tuple[int, int] = (0, 0)

    def describe(self) -> str:
        """The reason for a person."""
        match self.code:
            case ServiceRefusalCode.VERSION:
                lowest, highest = self.versions
                return (
                    f"the service speaks protocol versions {lowest} to {highest}, this flare {SERVICE_VERSIONS[0]} to "
                    f"{SERVICE_VERSIONS[1]}; install the same flare on both sides"
                )
            case ServiceRefusalCode.SECURITY:
                return "one side uses TLS and the other plaintext: give selenes:// for TLS, selene:// for plaintext"
            case ServiceRefusalCode.WRONG_KEY:
                return "the pool keys differ: the key file must hold the same key on both sides"
            case ServiceRefusalCode.UNKNOWN_SESSION:
                return "the service knows no such session (it was restarted, or the link of the session has ended)"
            case ServiceRefusalCode.CLOSING:
                return "the service is ending"

    def encode(self) -> bytes:
        """Payload of a SERVICE_REFUSE frame."""
        return _REFUSAL.pack(self.code, *self.versions)

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> "ServiceRefusal":
        """Parse one; raises `RemoteProtocolError`."""
        _need("SERVICE_REFUSE", payload, _REFUSAL.size)
        code, lowest, highest = _REFUSAL.unpack(payload)
        try:
            return cls(ServiceRefusalCode(code), (lowest, highest))
        except ValueError:
            raise RemoteProtocolError(f"refused with the unknown reason {code}") from None


@dataclass(frozen=True, slots=True)
class ServiceHello:
    """A client's first message. `certificate` is DER, empty where links are plaintext."""

    versions: tuple[int, int]
    security: Security
    nonce: bytes
    certificate: bytes

    def encode(self) -> bytes:
        """Payload of a SERVICE_HELLO frame."""
        return _HELLO.pack(*self.versions, self.security, self.nonce, len(self.certificate)) + self.certificate

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> "ServiceHello":
        """Parse one; raises `RemoteProtocolError`."""
        certificate = _certificate("SERVICE_HELLO", payload, _HELLO)
        lowest, highest, security, nonce, _ = _HELLO.unpack_from(payload)
        return cls((lowest, highest), _security(security), nonce, certificate)


@dataclass(frozen=True, slots=True)
class ServiceWelcome:
    """The service's reply. `mac` proves that it holds the key; `epoch` names its process."""

    version: int
    security: Security
    session_id: bytes
    epoch: bytes
    nonce: bytes
    mac: bytes
    certificate: bytes

    def encode(self) -> bytes:
        """Payload of a SERVICE_WELCOME frame."""
        fixed = _WELCOME.pack(
            self.version, self.security, self.session_id, self.epoch, self.nonce, self.mac, len(self.certificate)
        )
        return fixed + self.certificate

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> "ServiceWelcome":
        """Parse one; raises `RemoteProtocolError`."""
        certificate = _certificate("SERVICE_WELCOME", payload, _WELCOME)
        version, security, session_id, epoch, nonce, mac, _ = _WELCOME.unpack_from(payload)
        return cls(version, _security(security), session_id, epoch, nonce, mac, certificate)


@dataclass(frozen=True, slots=True)
class BulkHello:
    """First message of a bulk connection: the session it belongs to, and a fresh nonce."""

    session_id: bytes
    nonce: bytes

    def encode(self) -> bytes:
        """Payload of a BULK_HELLO frame."""
        return _BULK_HELLO.pack(self.session_id, self.nonce)

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> "BulkHello":
        """Parse one; raises `RemoteProtocolError`."""
        _need("BULK_HELLO", payload, _BULK_HELLO.size)
        return cls(*_BULK_HELLO.unpack(payload))


@dataclass(frozen=True, slots=True)
class BulkAccept:
    """The service's reply on a bulk connection: its nonce, and the proof that it holds the session's key."""

    nonce: bytes
    mac: bytes

    def encode(self) -> bytes:
        """Payload of a BULK_ACCEPT frame."""
        return _BULK_ACCEPT.pack(self.nonce, self.mac)

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> "BulkAccept":
        """Parse one; raises `RemoteProtocolError`."""
        _need("BULK_ACCEPT", payload, _BULK_ACCEPT.size)
        return cls(*_BULK_ACCEPT.unpack(payload))


@dataclass(frozen=True, slots=True)
class ServiceSession:
    """What a handshake established, on either side.

    Attributes:
        id: 16 bytes, not secret; names the session when a bulk connection is opened.
        key: 32 bytes that both sides derived; never sent.
        epoch: of the service's process; another one is another process.
        credentials: this side's certificate; None where links are plaintext.
        peer_certificate: the other side's, DER.
    """

    id: bytes
    key: bytes = field(repr=False)
    epoch: bytes
    credentials: Credentials | None
    peer_certificate: bytes


def transcript(hello: ServiceHello, welcome: ServiceWelcome) -> bytes:
    """The bytes that both MACs cover: every field of both messages but the MAC, certificates by digest."""
    return _DOMAIN + _TRANSCRIPT.pack(
        *hello.versions,
        welcome.version,
        hello.security,
        welcome.security,
        hello.nonce,
        welcome.nonce,
        welcome.session_id,
        welcome.epoch,
        certificate_digest(hello.certificate),
        certificate_digest(welcome.certificate),
    )


def service_mac(key: bytes, covered: bytes) -> bytes:
    """The service's proof that it holds the key."""
    return hmac.digest(derive_key(key, "flare/1/service"), b"srv\0" + covered, "sha256")


def client_mac(key: bytes, covered: bytes) -> bytes:
    """The client's proof; neither side's serves as the other's."""
    return hmac.digest(derive_key(key, "flare/1/service"), b"cli\0" + covered, "sha256")


def session_key(key: bytes, covered: bytes) -> bytes:
    """The key of a session, bound to everything that its handshake said."""
    return derive_key(key, "flare/1/service/session", salt=covered)


def bulk_mac(session: ServiceSession, role: bytes, client_nonce: bytes, service_nonce: bytes) -> bytes:
    """One side's proof on a bulk connection. `role` is `b"srv"` or `b"cli"`."""
    key = derive_key(session.key, "flare/1/service/bulk")
    return hmac.digest(key, role + b"\0" + session.id + client_nonce + service_nonce, "sha256")


def _need(name: str, payload: bytes | memoryview, num_bytes: int) -> None:
    if len(payload) != num_bytes:
        raise RemoteProtocolError(f"a {name} frame of {len(payload)} bytes; expected {num_bytes}")


def _certificate(name: str, payload: bytes | memoryview, fixed: struct.Struct) -> bytes:
    if len(payload) < fixed.size:
        raise RemoteProtocolError(f"a {name} frame of {len(payload)} bytes; expected at least {fixed.size}")
    length = fixed.unpack_from(payload)[-1]
    certificate = bytes(payload[fixed.size :])
    if length != len(certificate) or length > MAX_CERTIFICATE_BYTES:
        raise RemoteProtocolError(f"a {name} frame announces a certificate of {length} bytes, has {len(certificate)}")
    return certificate


def _security(value: int) -> Security:
    try:
        return Security(value)
    except ValueError:
        raise RemoteProtocolError(f"unknown link security {value}") from None
