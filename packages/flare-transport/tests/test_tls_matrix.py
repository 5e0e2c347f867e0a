"""What TLS refuses on real links, at the rendezvous and on second connections, from both ends: named, and nothing told.

Every attacker here holds the cluster key and keeps to the protocol until TLS: without the key none comes that far.
"""

import contextlib
import datetime
import queue
import socket
import ssl
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flare_transport import (
    LinkOffer,
    RendezvousError,
    RendezvousSettings,
    SecondLinkError,
    Security,
    Session,
    dial_link,
    encode_frame,
    meet,
    open_link_listener,
)
from flare_transport.certificates import Credentials, make_credentials, secure_socket
from flare_transport.frame_types import COMPLETE, LINK_ACCEPT, LINK_PROOF
from flare_transport.handshake import HandshakeSettings, PeerHandshake, Proven, RankZeroHandshake, rendezvous_key
from flare_transport.handshake_messages import certificate_digest
from flare_transport.second_link import dialler_proof
from flare_transport.session import PeerIdentity

KEY = bytes(range(1, 33))
SECONDS = 20.0
NOW = datetime.datetime.now(datetime.UTC)


def signed_by_an_authority():
    """A certificate that an authority of its own has signed, as an operator's would be."""
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an authority")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "flare")])
    day = datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - day)
        .not_valid_after(NOW + day)
        .sign(authority, hashes.SHA256())
    )
    key = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Credentials(certificate.public_bytes(serialization.Encoding.DER), key)


@dataclass(frozen=True)
class Shown:
    """What an attacker does where TLS begins, and the reason that the other side must name.

    `pinned`: the certificate that the other side expects, if not a fresh one; `credentials`: what is shown (None: no
    certificate); `plaintext`: no TLS at all.
    """

    reason: str
    pinned: Credentials | None = None
    credentials: Credentials | None = None
    maximum: ssl.TLSVersion | None = None
    plaintext: bool = False


def matrix():
    expired = make_credentials(NOW - datetime.timedelta(days=500))
    future = make_credentials(NOW + datetime.timedelta(days=500))
    own = make_credentials()
    return {
        "expired": Shown("certificate has expired", expired, expired),
        "not yet valid": Shown("certificate is not yet valid", future, future),
        "of another authority": Shown("unable to get local issuer certificate", None, signed_by_an_authority()),
        "another self-signed": Shown("self-signed certificate", None, make_credentials()),
        "TLS 1.2": Shown("UNSUPPORTED_PROTOCOL|TLSV1_ALERT_PROTOCOL_VERSION", own, own, ssl.TLSVersion.TLSv1_2),
        "no TLS": Shown("WRONG_VERSION_NUMBER|PACKET_LENGTH_TOO_LONG|RECORD_LAYER_FAILURE", own, plaintext=True),
    }


MATRIX = matrix()
CLIENTS = MATRIX | {"no certificate": Shown("PEER_DID_NOT_RETURN_A_CERTIFICATE")}


def context_of(shown: Shown, trusted: bytes, tmp_path, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=trusted)
    if shown.maximum is not None:
        context.maximum_version = shown.maximum
    if shown.credentials is not None:
        pem = ssl.DER_cert_to_PEM_cert(shown.credentials.certificate).encode() + shown.credentials.private_key
        (tmp_path / "shown.pem").write_bytes(pem)
        context.load_cert_chain(tmp_path / "shown.pem")
    return context


def secrets_of(nonce: bytes = b"") -> list[bytes]:
    return [secret for secret in (KEY, KEY.hex().encode(), rendezvous_key(KEY), nonce) if secret]


def attack(sock: socket.socket, shown: Shown, trusted: bytes, tmp_path, *, is_server: bool, plain: bytes) -> bytes:
    """Do what `shown` says until the other side hangs up; returns every byte that it sent meanwhile, as sent."""
    sock.settimeout(SECONDS)
    heard = bytearray()
    if shown.plaintext:
        sock.sendall(plain)
        with contextlib.suppress(OSError):
            while data := sock.recv(65536):
                heard += data
        return bytes(heard)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context_of(shown, trusted, tmp_path, is_server=is_server).wrap_bio(incoming, outgoing, server_side=is_server)
    is_shaken = False
    with contextlib.suppress(OSError):
        while True:
            try:
                if not is_shaken:
                    tls.do_handshake()
                    is_shaken = True
                assert tls.read(1 << 16) == b"", "something was said inside TLS"
            except ssl.SSLWantReadError:
                sock.sendall(outgoing.read())
                data = sock.recv(65536)
                heard += data
                if not data:
                    return bytes(heard)
                incoming.write(data)
            except ssl.SSLError:
                sock.sendall(outgoing.read())
                sock.shutdown(socket.SHUT_WR)
                while data := sock.recv(65536):
                    heard += data
                return bytes(heard)
    return bytes(heard)


def check_nothing_told(heard: bytes, nonce: bytes = b"") -> None:
    for secret in secrets_of(nonce):
        assert secret not in heard
    assert encode_frame(COMPLETE) not in heard
    assert encode_frame(LINK_ACCEPT, b"")[:8] not in heard


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def place(loopback_address):
    return RendezvousSettings(loopback_address, 0, 2, KEY, deadline_seconds=SECONDS)


def connect(address) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address.host, address.port), timeout=SECONDS)
        except ConnectionRefusedError:
            continue


def shake_hands(sock: socket.socket, certificate: bytes) -> Proven:
    """The protocol by the book, as rank 1 with the key."""
    machine = PeerHandshake(HandshakeSettings(KEY, 2, Security.TLS, b"n" * 32, certificate), 1)
    sock.sendall(machine.start())
    while machine.outcome is None:
        sock.sendall(machine.receive(sock.recv(machine.num_bytes_wanted)))
    assert isinstance(machine.outcome, Proven)
    return machine.outcome


@pytest.mark.parametrize("name", CLIENTS)
def test_the_rendezvous_refuses_a_client_by_name_and_the_right_peer_joins(name, place, threads, closing, tmp_path):
    shown = CLIENTS[name]
    sightings = queue.SimpleQueue()
    zero = threads.submit(meet, place, observe=sightings.put)
    with connect(place.address) as sock:
        proven = shake_hands(sock, (shown.pinned or make_credentials()).certificate)
        heard = attack(sock, shown, proven.certificate, tmp_path, is_server=False, plain=encode_frame(COMPLETE))
    refused = sightings.get(timeout=SECONDS)
    assert not refused.has_joined
    assert refused.rank == 1
    assert any(reason in refused.detail for reason in shown.reason.split("|")), refused.detail
    check_nothing_told(heard)
    closing.append(meet(replace(place, rank=1)))
    closing.append(zero.result())


@pytest.mark.parametrize("name", MATRIX)
def test_a_peer_refuses_a_rank_zero_by_name(name, place, threads, tmp_path):
    shown = MATRIX[name]
    pinned = shown.pinned or make_credentials()
    with socket.create_server((place.address.host, place.address.port)) as listener:

        def serve() -> bytes:
            sock, _ = listener.accept()
            with sock:
                settings = HandshakeSettings(KEY, 2, Security.TLS, b"z" * 32, pinned.certificate)
                machine = RankZeroHandshake(settings, b"r" * 16)
                while machine.outcome is None:
                    sock.sendall(machine.receive(sock.recv(machine.num_bytes_wanted)))
                sock.sendall(machine.accept())
                trusted = machine.outcome.certificate
                return attack(sock, shown, trusted, tmp_path, is_server=True, plain=encode_frame(COMPLETE))

        served = threads.submit(serve)
        sightings = queue.SimpleQueue()
        with pytest.raises(RendezvousError, match="could not join"):
            meet(replace(place, rank=1, deadline_seconds=1.0), observe=sightings.put)
        refused = sightings.get(timeout=SECONDS)
        assert any(reason in refused.detail for reason in shown.reason.split("|")), refused.detail
        check_nothing_told(served.result())


def met(gather_group, shown: Shown, **settings):
    """Two ranks; rank zero pinned for rank 1 what `shown` asks for."""
    groups = gather_group(2, key=KEY, **settings)
    identity = groups[0].peers[1].identity
    if shown.pinned is not None:
        identity = replace(identity, certificate=shown.pinned.certificate)
    return groups, identity


@pytest.mark.parametrize("name", CLIENTS)
def test_a_second_connection_refuses_a_client_by_name(name, gather_group, threads, tmp_path, caplog):
    shown = CLIENTS[name]
    groups, identity = met(gather_group, shown)
    listener = open_link_listener(groups[0].session, [identity], purpose="record")
    offer = listener.offers[1]
    accepted = threads.submit(listener.accept, timeout_seconds=1.0)
    proof = encode_frame(LINK_PROOF, dialler_proof(groups[1].session, "record", 1, offer.nonce))
    trusted = groups[0].session.certificate
    with socket.create_connection((offer.host, offer.port)) as sock:
        heard = attack(sock, shown, trusted, tmp_path, is_server=False, plain=proof)
    with pytest.raises(SecondLinkError, match=shown.reason):
        accepted.result()
    check_nothing_told(heard, offer.nonce)
    assert any(reason in caplog.text for reason in shown.reason.split("|")), "it is not in rank zero's log"


@pytest.mark.parametrize("name", CLIENTS)
def test_a_second_connection_takes_the_right_peer_after_any_refusal(name, gather_group, threads, tmp_path, closing):
    shown = CLIENTS[name]
    groups = gather_group(2, key=KEY)
    listener = open_link_listener(groups[0].session, [groups[0].peers[1].identity], purpose="record")
    offer = listener.offers[1]
    accepted = threads.submit(listener.accept)
    with socket.create_connection((offer.host, offer.port)) as sock:
        attack(sock, shown, groups[0].session.certificate, tmp_path, is_server=False, plain=b"plain")
    closing.append(dial_link(groups[1].session, groups[1].peers[0].identity, offer))
    closing.extend(accepted.result().values())


def test_another_rank_of_the_group_is_refused_in_a_ranks_place(gather_group, threads, tmp_path, closing):
    groups = gather_group(3, key=KEY)
    identities = [groups[0].peers[rank].identity for rank in (1, 2)]
    listener = open_link_listener(groups[0].session, identities, purpose="record")
    accepted = threads.submit(listener.accept, timeout_seconds=1.0)
    # Rank 2 knows the key, the run, and has stolen rank 1's offer; its certificate is not rank 1's.
    thief = replace(groups[2].session, rank=1)
    with pytest.raises(SecondLinkError):
        dial_link(thief, groups[2].peers[0].identity, listener.offers[1])
    closing.append(dial_link(groups[2].session, groups[2].peers[0].identity, listener.offers[2]))
    with pytest.raises(SecondLinkError, match=r"rank 1 \(.*self-signed certificate"):
        accepted.result()


@pytest.mark.parametrize("name", MATRIX)
def test_a_dialling_peer_refuses_a_listener_by_name(name, threads, tmp_path):
    shown = MATRIX[name]
    pinned = shown.pinned or make_credentials()
    own = make_credentials()
    session = Session(b"r" * 16, 1, 2, Security.TLS, KEY, own)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> bytes:
            sock, _ = server.accept()
            with sock:
                plain = encode_frame(LINK_ACCEPT, b"m" * 32)
                return attack(sock, shown, own.certificate, tmp_path, is_server=True, plain=plain)

        served = threads.submit(serve)
        digest = certificate_digest(pinned.certificate)
        zero = PeerIdentity(0, "127.0.0.1", "127.0.0.1", pinned.certificate, digest)
        offer = LinkOffer("record", "127.0.0.1", server.getsockname()[1], b"o" * 32)
        with pytest.raises(SecondLinkError, match=shown.reason):
            dial_link(session, zero, offer)
        check_nothing_told(served.result(), offer.nonce)


def test_whoever_holds_the_cluster_key_is_let_in(place, threads, closing):
    """A made-up process with the key and nothing else of the group's takes a rank."""
    zero = threads.submit(meet, place)
    own = make_credentials()
    sock = connect(place.address)
    closing.append(sock)
    proven = shake_hands(sock, own.certificate)
    closing.append(
        secure_socket(sock, own, peer_certificate=proven.certificate, is_server=False, timeout_seconds=SECONDS)
    )
    closing.append(zero.result())
    assert sorted(closing[-1].peers) == [1]


def test_a_connection_that_is_reset_before_tls_begins_is_closed_and_named(tcp_pair):
    near, far = tcp_pair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    with pytest.raises(OSError, match=r"reset|not connected|Connection"):
        secure_socket(
            far, make_credentials(), peer_certificate=make_credentials().certificate, is_server=True, timeout_seconds=5
        )
    assert far.fileno() == -1
