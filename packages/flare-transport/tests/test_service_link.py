"""Sessions with a service over real sockets: who gets in, who does not, and what crosses the wire."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from flare_transport import (
    Address,
    BulkUnit,
    FrameType,
    Link,
    Router,
    Security,
    ServiceListener,
    ServiceRefused,
    ServiceSession,
    UnitOp,
    dial_bulk,
    dial_service,
    open_service,
    transfer_key,
)
from flare_transport.errors import RemoteProtocolError
from flare_transport.frame_types import BULK_HELLO, BULK_PROOF, SERVICE_ACCEPT, SERVICE_PROOF, by_code
from flare_transport.framing import FrameDecoder, encode_frame
from flare_transport.service_handshake import ClientHandshake, ServiceHandshake, ServiceState, ServiceTerms
from flare_transport.service_messages import BulkHello, ServiceRefusalCode

KEY = bytes(range(32))
ECHO = FrameType(40, "ECHO", 1024)
BOTH = pytest.mark.parametrize("security", [Security.TLS, Security.PLAINTEXT], ids=["tls", "plaintext"])


@dataclass
class Service:
    """A service that echoes frames and, on bulk connections, bytes."""

    listener: ServiceListener
    epoch: bytes
    sessions: queue.Queue[ServiceSession] = field(default_factory=queue.Queue)
    links: list[Link] = field(default_factory=list)

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.listener.port)

    def control(self, link: Link, session: ServiceSession, source: str) -> None:
        assert source == "127.0.0.1"
        router = Router()
        router.route(ECHO, lambda back, payload: back.send(ECHO, bytes(payload)))
        router.on_end(lambda *_: self.listener.forget(session))
        self.links.append(link)
        link.start(router)
        self.sessions.put(session)

    def bulk(self, sock: socket.socket, session: ServiceSession) -> None:
        del session
        with contextlib.suppress(OSError):
            while data := sock.recv(65536):
                sock.sendall(data)


@contextlib.contextmanager
def serving(security: Security, key: bytes = KEY) -> Iterator[Service]:
    epoch = secrets.token_bytes(16)
    listener = open_service(Address("127.0.0.1", 0), key=key, security=security, epoch=epoch)
    service = Service(listener, epoch)
    thread = threading.Thread(target=listener.serve, args=(service.control, service.bulk))
    thread.start()
    try:
        yield service
    finally:
        listener.close()
        thread.join()
        for link in service.links:
            link.close()


@contextlib.contextmanager
def connected(service: Service, security: Security) -> Iterator[tuple[ServiceSession, queue.Queue[bytes], Link]]:
    link, session = dial_service(service.address, key=KEY, security=security)
    heard: queue.Queue[bytes] = queue.Queue()
    router = Router()
    router.route(ECHO, lambda _, payload: heard.put(bytes(payload)))
    link.start(router)
    try:
        yield session, heard, link
    finally:
        link.close()


@BOTH
def test_a_session_has_one_key_on_both_sides_and_carries_frames_and_bulk(security: Security) -> None:
    with serving(security) as service, connected(service, security) as (session, heard, link):
        theirs = service.sessions.get(timeout=5)
        assert (theirs.id, theirs.key, theirs.epoch) == (session.id, session.key, service.epoch)
        assert session.epoch == service.epoch
        link.send(ECHO, b"ping")
        assert heard.get(timeout=5) == b"ping"
        for _ in range(3):
            with contextlib.closing(dial_bulk(service.address, session)) as sock:
                sock.sendall(b"bulk")
                assert sock.recv(4) == b"bulk"


@BOTH
def test_a_client_with_another_key_is_refused_and_told_why(security: Security) -> None:
    with serving(security, key=bytes(32)) as service, pytest.raises(ServiceRefused, match="the pool keys differ"):
        dial_service(service.address, key=KEY, security=security)


def test_a_client_of_the_other_security_is_refused_and_told_the_remedy() -> None:
    with serving(Security.TLS) as service, pytest.raises(ServiceRefused, match="selenes:// for TLS"):
        dial_service(service.address, key=KEY, security=Security.PLAINTEXT)


@BOTH
def test_a_bulk_connection_of_no_session_or_of_one_that_ended_is_refused(security: Security) -> None:
    with serving(security) as service:
        with connected(service, security) as (session, _, link):
            ended = threading.Event()
            theirs = service.sessions.get(timeout=5)
            service.listener.forget(theirs)
            with pytest.raises(ServiceRefused, match="no such session"):
                dial_bulk(service.address, session)
            ended.set()
            link.close()
        stranger = ServiceSession(bytes(16), bytes(32), session.epoch, session.credentials, session.peer_certificate)
        with pytest.raises(ServiceRefused, match="no such session"):
            dial_bulk(service.address, stranger)


def test_a_bulk_proof_that_was_heard_opens_no_second_connection() -> None:
    with serving(Security.PLAINTEXT) as service, connected(service, Security.PLAINTEXT) as (session, _, _link):
        hello = encode_frame(BULK_HELLO, BulkHello(session.id, bytes(32)).encode())
        replayed = encode_frame(BULK_PROOF, bytes(32))
        with socket.create_connection((service.address.host, service.address.port)) as sock:
            sock.sendall(hello)
            assert sock.recv(16 + 64, socket.MSG_WAITALL)
            sock.sendall(replayed)
            assert sock.recv(1) == b""


def test_nothing_secret_crosses_a_plaintext_connection() -> None:
    """All bytes of a session's handshakes are recorded; neither key nor anything derived from it is among them."""
    seen = bytearray()
    with serving(Security.PLAINTEXT) as service, contextlib.closing(socket.create_server(("127.0.0.1", 0))) as front:

        def pump(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(4096):
                    seen.extend(data)
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def relay() -> None:
            for _ in range(2):
                client, _ = front.accept()
                server = socket.create_connection((service.address.host, service.address.port))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()
                sockets.extend((client, server))

        sockets: list[socket.socket] = []
        thread = threading.Thread(target=relay)
        thread.start()
        through = Address("127.0.0.1", front.getsockname()[1])
        link, session = dial_service(through, key=KEY, security=Security.PLAINTEXT)
        sock = dial_bulk(through, session)
        thread.join()
        transfer = secrets.token_bytes(16)
        unit = BulkUnit.make(transfer_key(session.key, transfer), UnitOp.GET, transfer, offset=0, length=1)
        sock.sendall(unit.encode())
        assert sock.recv(len(unit.encode()), socket.MSG_WAITALL) == unit.encode()
        link.close()
        for each in (sock, *sockets):
            each.close()
    assert seen
    for secret in (KEY, session.key, transfer_key(session.key, transfer)):
        assert secret not in seen


def _terms(nonce: bytes, key: bytes = KEY, versions: tuple[int, int] = (1, 1)) -> ServiceTerms:
    return ServiceTerms(key, Security.PLAINTEXT, nonce, None, versions)


def test_a_service_of_the_future_is_refused_by_version() -> None:
    client = ClientHandshake(_terms(bytes(32)))
    service = ServiceHandshake(_terms(bytes(32), versions=(2, 3)), session_id=bytes(16), epoch=bytes(16))
    client.receive(service.receive(client.start()))
    outcome = client.outcome
    assert not isinstance(outcome, ServiceSession)
    assert outcome is not None
    assert outcome.code is ServiceRefusalCode.VERSION
    assert "versions 2 to 3" in outcome.describe()


def test_a_welcome_that_was_changed_or_reflected_is_not_believed() -> None:
    for at in range(16, 16 + 102, 5):
        client = ClientHandshake(_terms(b"c" * 32))
        service = ServiceHandshake(_terms(b"s" * 32), session_id=bytes(16), epoch=bytes(16))
        welcome = bytearray(service.receive(client.start()))
        welcome[at] ^= 1
        with contextlib.suppress(RemoteProtocolError):
            client.receive(bytes(welcome))
        assert client.state in (ServiceState.REFUSED, ServiceState.FAILED), at


def test_a_frame_out_of_turn_ends_the_handshake() -> None:
    client = ClientHandshake(_terms(bytes(32)))
    client.start()
    with pytest.raises(RemoteProtocolError, match="SERVICE_ACCEPT"):
        client.receive(encode_frame(SERVICE_ACCEPT))
    service = ServiceHandshake(_terms(bytes(32)), session_id=bytes(16), epoch=bytes(16))
    with pytest.raises(RemoteProtocolError, match="SERVICE_PROOF"):
        service.receive(encode_frame(SERVICE_PROOF, bytes(32)))


def test_a_unit_is_proven_for_its_own_range_operation_and_transfer_only() -> None:
    key = transfer_key(KEY, bytes(16))
    unit = BulkUnit.make(key, UnitOp.GET, bytes(16), offset=4096, length=8192)
    assert BulkUnit.decode(unit.encode()) == unit
    assert unit.is_proven(key)
    others = (
        BulkUnit(UnitOp.PUT, unit.transfer, 4096, 8192, unit.mac),
        BulkUnit(UnitOp.GET, b"x" * 16, 4096, 8192, unit.mac),
        BulkUnit(UnitOp.GET, unit.transfer, 0, 8192, unit.mac),
        BulkUnit(UnitOp.GET, unit.transfer, 4096, 8191, unit.mac),
    )
    assert not any(other.is_proven(key) for other in others)
    assert not unit.is_proven(transfer_key(KEY, b"y" * 16))
    assert FrameDecoder(by_code(BULK_HELLO)).num_bytes_wanted
