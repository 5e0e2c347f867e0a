"""The handshake between a service and a client, both roles, without I/O, clock or randomness.

Owns what may follow what (the two tables) and every check; knows neither sockets nor what the session is for.

    client                               service
    SERVICE_HELLO (nonce, certificate)   ->
                                         <-  SERVICE_WELCOME (session, epoch, nonce, certificate, MAC "srv")
    SERVICE_PROOF (MAC "cli")            ->
                                         <-  SERVICE_ACCEPT, or SERVICE_REFUSE with a reason
Afterwards both start TLS with exactly the certificates just authenticated, or go on in plaintext if both were told to.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from flare_transport.certificates import Credentials
from flare_transport.errors import LocalProtocolError, RemoteProtocolError, VersionMismatchError
from flare_transport.frame_types import (
    SERVICE_ACCEPT,
    SERVICE_HELLO,
    SERVICE_PROOF,
    SERVICE_REFUSE,
    SERVICE_WELCOME,
    by_code,
)
from flare_transport.framing import Frame, FrameDecoder, FrameType, encode_frame
from flare_transport.handshake_messages import Security
from flare_transport.service_messages import (
    SERVICE_VERSIONS,
    ServiceHello,
    ServiceRefusal,
    ServiceRefusalCode,
    ServiceSession,
    ServiceWelcome,
    client_mac,
    service_mac,
    session_key,
    transcript,
)

__all__ = ["CLIENT_TABLE", "SERVICE_TABLE", "ClientHandshake", "ServiceHandshake", "ServiceState", "ServiceTerms"]


class ServiceState(Enum):
    """Where a handshake stands; the states of both roles."""

    START = "start"
    WELCOME_DUE = "welcome due"
    ACCEPT_DUE = "accept due"
    HELLO_DUE = "hello due"
    PROOF_DUE = "proof due"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    FAILED = "failed"


_Table: TypeAlias = Mapping[tuple[ServiceState, FrameType], ServiceState]

CLIENT_TABLE: _Table = {
    (ServiceState.WELCOME_DUE, SERVICE_WELCOME): ServiceState.ACCEPT_DUE,
    (ServiceState.WELCOME_DUE, SERVICE_REFUSE): ServiceState.REFUSED,
    (ServiceState.ACCEPT_DUE, SERVICE_ACCEPT): ServiceState.ACCEPTED,
    (ServiceState.ACCEPT_DUE, SERVICE_REFUSE): ServiceState.REFUSED,
}
SERVICE_TABLE: _Table = {
    (ServiceState.HELLO_DUE, SERVICE_HELLO): ServiceState.PROOF_DUE,
    (ServiceState.PROOF_DUE, SERVICE_PROOF): ServiceState.ACCEPTED,
    (ServiceState.PROOF_DUE, SERVICE_REFUSE): ServiceState.REFUSED,
}


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """What one side brings. `nonce` is 32 fresh random bytes; `credentials` is None where links are plaintext."""

    key: bytes
    security: Security
    nonce: bytes
    credentials: Credentials | None
    versions: tuple[int, int] = SERVICE_VERSIONS

    @property
    def certificate(self) -> bytes:
        """DER, empty without credentials."""
        return self.credentials.certificate if self.credentials is not None else b""


class ClientHandshake:
    """The client's side. `start()` gives the first bytes; `receive(data)` gives the bytes to send back.

    Ends with `outcome` set to a `ServiceSession` (the service holds the key and accepted) or a `ServiceRefusal`.
    """

    def __init__(self, terms: ServiceTerms) -> None:
        self._terms = terms
        self._hello = ServiceHello(terms.versions, terms.security, terms.nonce, terms.certificate)
        self._decoder = FrameDecoder(by_code(SERVICE_WELCOME, SERVICE_ACCEPT, SERVICE_REFUSE))
        self._session: ServiceSession | None = None
        self.state = ServiceState.START
        self.outcome: ServiceSession | ServiceRefusal | None = None

    @property
    def num_bytes_wanted(self) -> int:
        """How many bytes to read next, so that none of what follows the handshake is taken."""
        return self._decoder.num_bytes_wanted

    def start(self) -> bytes:
        """The bytes to send first."""
        if self.state is not ServiceState.START:
            raise LocalProtocolError("this handshake was started before")
        self.state = ServiceState.WELCOME_DUE
        return encode_frame(SERVICE_HELLO, self._hello.encode())

    def receive(self, data: bytes) -> bytes:
        """Take bytes of the service; raises `RemoteProtocolError`, after which the handshake has failed for good."""
        try:
            return b"".join([self._step(frame) for frame in self._decoder.receive(data)])
        except RemoteProtocolError:
            self.state = ServiceState.FAILED
            raise

    def _step(self, frame: Frame) -> bytes:
        following = _next_state(CLIENT_TABLE, self.state, frame.type)
        if frame.type == SERVICE_WELCOME:
            return self._answer(ServiceWelcome.decode(frame.payload), following)
        self.outcome = ServiceRefusal.decode(frame.payload) if frame.type == SERVICE_REFUSE else self._session
        self.state = following
        return b""

    def _answer(self, welcome: ServiceWelcome, following: ServiceState) -> bytes:
        terms, covered = self._terms, transcript(self._hello, welcome)
        if not hmac.compare_digest(welcome.mac, service_mac(terms.key, covered)):
            self.state = ServiceState.REFUSED
            self.outcome = ServiceRefusal(ServiceRefusalCode.WRONG_KEY)
            return encode_frame(SERVICE_REFUSE, self.outcome.encode())
        # Past this point the service holds the key, so that a disagreement is a fault of its program, not an attack.
        lowest, highest = terms.versions
        if welcome.security is not terms.security or not lowest <= welcome.version <= highest:
            raise RemoteProtocolError("the service welcomed a client of another version or link security")
        key = session_key(terms.key, covered)
        self._session = ServiceSession(welcome.session_id, key, welcome.epoch, terms.credentials, welcome.certificate)
        self.state = following
        return encode_frame(SERVICE_PROOF, client_mac(terms.key, covered))


class ServiceHandshake:
    """The service's side of one connection. `receive(data)` gives the bytes to send back, the acceptance included.

    Ends with `outcome` set to the `ServiceSession`, or to a `ServiceRefusal` by either side.
    """

    def __init__(self, terms: ServiceTerms, *, session_id: bytes, epoch: bytes) -> None:
        self._terms = terms
        self._session_id = session_id
        self._epoch = epoch
        self._decoder = FrameDecoder(by_code(SERVICE_HELLO, SERVICE_PROOF, SERVICE_REFUSE))
        self._covered = b""
        self._peer_certificate = b""
        self.state = ServiceState.HELLO_DUE
        self.outcome: ServiceSession | ServiceRefusal | None = None

    @property
    def num_bytes_wanted(self) -> int:
        """How many bytes to read next, so that none of what follows the handshake is taken."""
        return self._decoder.num_bytes_wanted

    def receive(self, data: bytes) -> bytes:
        """Take bytes of the client; raises `RemoteProtocolError`, after which the handshake has failed for good."""
        try:
            return b"".join([self._step(frame) for frame in self._decoder.receive(data)])
        except VersionMismatchError:
            return self._refuse(ServiceRefusalCode.VERSION)
        except RemoteProtocolError:
            self.state = ServiceState.FAILED
            raise

    def _step(self, frame: Frame) -> bytes:
        following = _next_state(SERVICE_TABLE, self.state, frame.type)
        if frame.type == SERVICE_HELLO:
            return self._greet(ServiceHello.decode(frame.payload), following)
        if frame.type == SERVICE_REFUSE:
            self.outcome, self.state = ServiceRefusal.decode(frame.payload), following
            return b""
        terms = self._terms
        if not hmac.compare_digest(bytes(frame.payload), client_mac(terms.key, self._covered)):
            return self._refuse(ServiceRefusalCode.WRONG_KEY)
        key = session_key(terms.key, self._covered)
        self.outcome = ServiceSession(self._session_id, key, self._epoch, terms.credentials, self._peer_certificate)
        self.state = following
        return encode_frame(SERVICE_ACCEPT)

    def _greet(self, hello: ServiceHello, following: ServiceState) -> bytes:
        terms = self._terms
        if max(terms.versions[0], hello.versions[0]) > min(terms.versions[1], hello.versions[1]):
            return self._refuse(ServiceRefusalCode.VERSION)
        if hello.security is not terms.security:
            return self._refuse(ServiceRefusalCode.SECURITY)
        unsigned = ServiceWelcome(
            min(hello.versions[1], terms.versions[1]),
            terms.security,
            self._session_id,
            self._epoch,
            terms.nonce,
            b"",
            terms.certificate,
        )
        self._covered = transcript(hello, unsigned)
        self._peer_certificate = hello.certificate
        self.state = following
        return encode_frame(SERVICE_WELCOME, replace(unsigned, mac=service_mac(terms.key, self._covered)).encode())

    def _refuse(self, code: ServiceRefusalCode) -> bytes:
        self.state = ServiceState.REFUSED
        self.outcome = ServiceRefusal(code, self._terms.versions)
        return encode_frame(SERVICE_REFUSE, self.outcome.encode())


def _next_state(table: _Table, state: ServiceState, frame_type: FrameType) -> ServiceState:
    following = table.get((state, frame_type))
    if following is None:
        raise RemoteProtocolError(f"a {frame_type.name} frame came while the handshake was in state '{state.value}'")
    return following
