"""A client's way to a service: the control link of a new session, and bulk connections that belong to it. Blocks."""

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable

from flare_transport.address import Address, resolve
from flare_transport.certificates import make_credentials, secure_socket
from flare_transport.channel import set_link_options
from flare_transport.errors import RemoteProtocolError, ServiceRefused
from flare_transport.frame_types import BULK_ACCEPT, BULK_HELLO, BULK_PROOF, SERVICE_REFUSE, by_code
from flare_transport.framing import Frame, FrameDecoder, encode_frame
from flare_transport.handshake_messages import NONCE_BYTES, Security
from flare_transport.link import Link, LinkSettings
from flare_transport.service_handshake import ClientHandshake, ServiceTerms
from flare_transport.service_messages import BulkAccept, BulkHello, ServiceRefusal, ServiceSession, bulk_mac
from flare_transport.timed_socket import TimedSocket

__all__ = ["dial_bulk", "dial_service"]


def dial_service(
    address: Address,
    *,
    key: bytes,
    security: Security,
    timeout_seconds: float = 5.0,
    link: LinkSettings | None = None,
) -> tuple[Link, ServiceSession]:
    """Open a session; returns its control link, not yet started, and what the handshake established.

    Raises `ServiceRefused` with the service's reason (another key, version or security), `OSError`, `AddressError`,
    `CertificateError` or `RemoteProtocolError`. Blocks for at most `timeout_seconds`, name resolution apart.
    """
    credentials = make_credentials() if security is Security.TLS else None
    machine = ClientHandshake(ServiceTerms(key, security, secrets.token_bytes(NONCE_BYTES), credentials))

    def shake_hands(timed: TimedSocket) -> ServiceSession:
        timed.send(machine.start())
        while machine.outcome is None:
            timed.send(machine.receive(timed.receive(machine.num_bytes_wanted)))
        if isinstance(machine.outcome, ServiceRefusal):
            raise ServiceRefused(f"{address} refuses: {machine.outcome.describe()}")
        return machine.outcome

    sock, session = _connect(address, shake_hands, time.monotonic() + timeout_seconds)
    return Link(sock, name=f"link to {address}", settings=link), session


def dial_bulk(address: Address, session: ServiceSession, *, timeout_seconds: float = 5.0) -> socket.socket:
    """Open one more connection of a session, for bulk transfers; returns a blocking socket, TLS like the session's.

    Raises as :func:`dial_service`.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)

    def shake_hands(timed: TimedSocket) -> ServiceSession:
        timed.send(encode_frame(BULK_HELLO, BulkHello(session.id, nonce).encode()))
        frame = _receive_frame(timed)
        if frame.type == SERVICE_REFUSE:
            raise ServiceRefused(f"{address} refuses: {ServiceRefusal.decode(frame.payload).describe()}")
        accept = BulkAccept.decode(frame.payload)
        if not hmac.compare_digest(accept.mac, bulk_mac(session, b"srv", nonce, accept.nonce)):
            raise RemoteProtocolError(f"{address} did not prove that the session is its own")
        timed.send(encode_frame(BULK_PROOF, bulk_mac(session, b"cli", nonce, accept.nonce)))
        return session

    return _connect(address, shake_hands, time.monotonic() + timeout_seconds)[0]


def _connect(
    address: Address, shake_hands: Callable[[TimedSocket], ServiceSession], deadline: float
) -> tuple[socket.socket, ServiceSession]:
    family, sockaddr = resolve(address)[0]
    with contextlib.ExitStack() as undo:
        timed = TimedSocket(socket.socket(family, socket.SOCK_STREAM), deadline)
        undo.callback(lambda: timed.socket.close())  # noqa: PLW0108  TLS takes its place
        set_link_options(timed.socket)
        timed.socket.settimeout(timed.remaining_seconds())
        timed.socket.connect(sockaddr)
        session = shake_hands(timed)
        if session.credentials is not None:
            timed.socket = secure_socket(
                timed.socket,
                session.credentials,
                peer_certificate=session.peer_certificate,
                is_server=False,
                timeout_seconds=timed.remaining_seconds(),
            )
        undo.pop_all()
    return timed.socket, session


def _receive_frame(timed: TimedSocket) -> Frame:
    """Read one frame, and not a byte more; raises `OSError` and `RemoteProtocolError`."""
    decoder = FrameDecoder(by_code(BULK_ACCEPT, SERVICE_REFUSE))
    while True:
        for frame in decoder.receive(timed.receive(decoder.num_bytes_wanted)):
            return Frame(frame.type, memoryview(bytes(frame.payload)))
