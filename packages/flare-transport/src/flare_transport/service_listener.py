"""A service's listening end: one port, on which a first frame asks for a session or for a bulk connection of one.

Owns sessions and the sockets until they are handed over; knows nothing of what they are used for. Strangers are held to
the bounds of `greeting`.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Mapping

from flare_transport.address import Address, listen_on
from flare_transport.certificates import Credentials, make_credentials, secure_socket
from flare_transport.errors import CertificateError, RemoteProtocolError
from flare_transport.frame_types import BULK_ACCEPT, BULK_HELLO, BULK_PROOF, SERVICE_REFUSE, by_code
from flare_transport.framing import FrameDecoder, FrameType, encode_frame
from flare_transport.greeting import Caller, GreetingSettings, Reception
from flare_transport.handshake_messages import NONCE_BYTES, Security
from flare_transport.link import Link, LinkSettings
from flare_transport.service_handshake import ServiceHandshake, ServiceTerms
from flare_transport.service_messages import (
    SESSION_ID_BYTES,
    BulkAccept,
    BulkHello,
    ServiceRefusal,
    ServiceRefusalCode,
    ServiceSession,
    bulk_mac,
)
from flare_transport.timed_socket import TimedSocket

__all__ = ["OnBulk", "OnControl", "ServiceListener", "open_service"]

_LOG = logging.getLogger(__name__)
_TURN_SECONDS = 0.25
_FRAME_HEADER_BYTES = 16

OnControl = Callable[[Link, ServiceSession, str], None]
"""A session has begun: its control link, not yet started, and the client's address. Runs in the greeting's thread."""

OnBulk = Callable[[socket.socket, ServiceSession], None]
"""A bulk connection of a session: a blocking socket, TLS like the session's. Runs in, and owns, a thread of its own."""


class ServiceListener:
    """Made by `open_service`. `serve` blocks; `close` ends it from any thread. Links that were handed over live on."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        key: bytes,
        security: Security,
        epoch: bytes,
        credentials: Credentials | None,
        greeting: GreetingSettings,
        link: LinkSettings | None,
    ) -> None:
        self._listener = listener
        self._key = key
        self._security = security
        self._epoch = epoch
        self._credentials = credentials
        self._greeting = greeting
        self._link = link
        self._lock = threading.Lock()
        self._sessions: dict[bytes, ServiceSession] = {}
        self._closing = threading.Event()
        self._on_control: OnControl | None = None
        self._on_bulk: OnBulk | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def serve(self, on_control: OnControl, on_bulk: OnBulk) -> None:
        """Accept until `close`. What the callbacks raise is logged and ends that connection only."""
        self._on_control, self._on_bulk = on_control, on_bulk
        reception = Reception([self._listener], self._greet, self._greeting)
        try:
            while not self._closing.is_set():
                reception.turn(_TURN_SECONDS)
        finally:
            reception.close()
            self._listener.close()

    def forget(self, session: ServiceSession) -> None:
        """The session has ended: no bulk connection of it is taken any more."""
        with self._lock:
            self._sessions.pop(session.id, None)

    def close(self) -> None:
        """End `serve`. Idempotent; does not wait."""
        self._closing.set()

    def _greet(self, caller: Caller) -> None:
        timed = TimedSocket(caller.socket, caller.deadline)
        try:
            timed.await_first()
            caller.progress = 1
            head = _peek(timed, _FRAME_HEADER_BYTES)
            if len(head) > 5 and head[5] == BULK_HELLO.code:
                self._greet_bulk(caller, timed)
            else:
                self._greet_control(caller, timed)
        except (OSError, CertificateError, RemoteProtocolError) as error:
            timed.socket.close()
            _LOG.warning("a connection from %s was turned away: %s", caller.source, error)

    def _greet_control(self, caller: Caller, timed: TimedSocket) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        terms = ServiceTerms(self._key, self._security, nonce, self._credentials)
        machine = ServiceHandshake(terms, session_id=secrets.token_bytes(SESSION_ID_BYTES), epoch=self._epoch)
        while machine.outcome is None:
            timed.send(machine.receive(timed.receive(machine.num_bytes_wanted)))
            caller.progress = 2
        if isinstance(machine.outcome, ServiceRefusal):
            _LOG.warning("a client at %s was refused: %s", caller.source, machine.outcome.describe())
            _close_gently(timed)
            return
        session = machine.outcome
        # Known before the client can come with a bulk connection, which it may as soon as it is through TLS.
        with self._lock:
            self._sessions[session.id] = session
        try:
            self._secure(caller, timed, session)
            if self._on_control is not None:
                self._on_control(Link(timed.socket, name=f"link to {caller.source}", settings=self._link), session,
                                 caller.source)  # fmt: skip
        except BaseException:
            self.forget(session)
            raise

    def _greet_bulk(self, caller: Caller, timed: TimedSocket) -> None:
        hello = BulkHello.decode(_receive_frame(timed, BULK_HELLO))
        with self._lock:
            session = self._sessions.get(hello.session_id)
        if session is None:
            timed.send(encode_frame(SERVICE_REFUSE, ServiceRefusal(ServiceRefusalCode.UNKNOWN_SESSION).encode()))
            _close_gently(timed)
            return
        nonce = secrets.token_bytes(NONCE_BYTES)
        accept = BulkAccept(nonce, bulk_mac(session, b"srv", hello.nonce, nonce))
        timed.send(encode_frame(BULK_ACCEPT, accept.encode()))
        shown = _receive_frame(timed, BULK_PROOF)
        if not hmac.compare_digest(shown, bulk_mac(session, b"cli", hello.nonce, nonce)):
            raise RemoteProtocolError("the proof of a bulk connection is wrong")
        caller.progress = 2
        self._secure(caller, timed, session)
        if self._on_bulk is not None:
            threading.Thread(
                target=self._run_bulk, args=(timed.socket, session), name="flare bulk connection", daemon=True
            ).start()

    def _run_bulk(self, sock: socket.socket, session: ServiceSession) -> None:
        try:
            if self._on_bulk is not None:
                self._on_bulk(sock, session)
        except Exception:  # noqa: BLE001  a thread's boundary: one connection's fault
            _LOG.exception("a bulk connection failed in a way that was not foreseen")
        finally:
            sock.close()

    def _secure(self, caller: Caller, timed: TimedSocket, session: ServiceSession) -> None:
        """TLS, where it is wanted, and nobody sends this caller away any more."""
        if session.credentials is not None:
            timed.socket = secure_socket(
                timed.socket,
                session.credentials,
                peer_certificate=session.peer_certificate,
                is_server=True,
                timeout_seconds=timed.remaining_seconds(),
            )
        if not caller.keep():
            raise RemoteProtocolError("sent away to make room")
        timed.socket.settimeout(None)


def open_service(
    address: Address,
    *,
    key: bytes,
    security: Security,
    epoch: bytes,
    greeting: GreetingSettings | None = None,
    link: LinkSettings | None = None,
) -> ServiceListener:
    """Listen at `address` (port 0: any free one); raises `AddressError`. `epoch`: 16 random bytes of this process."""
    return ServiceListener(
        listen_on(address),
        key=key,
        security=security,
        epoch=epoch,
        credentials=make_credentials() if security is Security.TLS else None,
        greeting=greeting or GreetingSettings(max_pending=256, max_pending_per_source=64),
        link=link,
    )


def _peek(timed: TimedSocket, num_bytes: int) -> bytes:
    """The first bytes, left where they are; waits until so many have come."""
    timed.socket.settimeout(timed.remaining_seconds())
    return timed.socket.recv(num_bytes, socket.MSG_PEEK | socket.MSG_WAITALL)


def _receive_frame(timed: TimedSocket, frame_type: FrameType) -> bytes:
    """Read one frame of this type, and not a byte more; raises `OSError` and `RemoteProtocolError`."""
    types: Mapping[int, FrameType] = by_code(frame_type)
    decoder = FrameDecoder(types)
    while True:
        for frame in decoder.receive(timed.receive(decoder.num_bytes_wanted)):
            return bytes(frame.payload)


def _close_gently(timed: TimedSocket) -> None:
    """Close after the other side has: closing over bytes not yet read would reset away the refusal just sent."""
    with contextlib.closing(timed.socket), contextlib.suppress(OSError):
        timed.socket.shutdown(socket.SHUT_WR)
        timed.receive(4096)
