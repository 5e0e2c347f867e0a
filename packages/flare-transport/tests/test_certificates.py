"""TLS between two sides that pinned each other: what is let through and what is not, over real sockets."""

import ssl
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from flare_transport import CertificateError
from flare_transport.certificates import Credentials, make_credentials, secure_socket


def secure_both(near, far, client, server, *, client_expects=None, server_expects=None):
    """Run both sides; returns what each ended with, a socket or the fault."""

    def run(sock, credentials, certificate, is_server):
        try:
            secured = secure_socket(
                sock, credentials, peer_certificate=certificate, is_server=is_server, timeout_seconds=10
            )
            # In TLS 1.3 a client learns only on its first read that the server refused its certificate.
            if is_server:
                secured.sendall(b"in")
            elif secured.recv(2) != b"in":
                secured.close()
                raise CertificateError("turned away")
        except ssl.SSLError as error:
            secured.close()
            return error
        except (CertificateError, OSError) as error:
            return error
        return secured

    with ThreadPoolExecutor(2) as sides:
        near_end = sides.submit(run, near, client, client_expects or server.certificate, False)
        far_end = sides.submit(run, far, server, server_expects or client.certificate, True)
        return near_end.result(), far_end.result()


def test_two_sides_that_pinned_each_other_speak_tls_1_3(tcp_pair, closing):
    client, server = make_credentials(), make_credentials()
    near, far = secure_both(*tcp_pair(), client, server)
    closing += [near, far]
    assert near.version() == far.version() == "TLSv1.3"
    assert near.getpeercert(binary_form=True) == server.certificate
    assert not near.session_reused
    near.sendall(b"hello")
    assert far.recv(5) == b"hello"


def refused(outcome):
    return isinstance(outcome, (CertificateError, OSError))


def test_a_server_with_another_certificate_is_refused(tcp_pair):
    client, server, pinned = make_credentials(), make_credentials(), make_credentials()
    near, far = secure_both(*tcp_pair(), client, server, client_expects=pinned.certificate)
    assert isinstance(near, CertificateError)
    assert refused(far)


def test_a_client_with_another_certificate_is_refused(tcp_pair):
    client, server, pinned = make_credentials(), make_credentials(), make_credentials()
    near, far = secure_both(*tcp_pair(), client, server, server_expects=pinned.certificate)
    assert isinstance(far, CertificateError)
    assert refused(near)


def test_a_stolen_certificate_without_its_key_is_refused(tcp_pair):
    client, server, thief = make_credentials(), make_credentials(), make_credentials()
    near, _far = tcp_pair()
    with pytest.raises(CertificateError):
        secure_socket(
            near,
            Credentials(server.certificate, thief.private_key),
            peer_certificate=client.certificate,
            is_server=True,
            timeout_seconds=1,
        )


@pytest.mark.parametrize("when", [timedelta(days=-500), timedelta(days=500)])
def test_an_expired_certificate_or_one_of_the_future_is_refused(tcp_pair, when):
    client, server = make_credentials(), make_credentials(datetime.now(UTC) + when)
    near, far = secure_both(*tcp_pair(), client, server)
    assert isinstance(near, CertificateError)
    assert refused(far)


def test_clocks_that_differ_by_hours_do_not_matter(tcp_pair, closing):
    client, server = make_credentials(), make_credentials(datetime.now(UTC) + timedelta(hours=20))
    secured = secure_both(*tcp_pair(), client, server)
    closing.extend(secured)
    assert all(isinstance(each, ssl.SSLSocket) for each in secured)


def test_tls_1_2_is_refused_even_with_the_right_certificates(tcp_pair, tmp_path):
    server, client = make_credentials(), make_credentials()
    near, far = tcp_pair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=server.certificate)
    (tmp_path / "pem").write_bytes(ssl.DER_cert_to_PEM_cert(client.certificate).encode() + client.private_key)
    context.load_cert_chain(tmp_path / "pem")
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(
            secure_socket, far, server, peer_certificate=client.certificate, is_server=True, timeout_seconds=10
        )
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(near)
        with pytest.raises(CertificateError):
            served.result()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64])
def test_a_plaintext_client_is_refused(tcp_pair, garbage):
    near, far = tcp_pair()
    near.sendall(garbage)
    with pytest.raises(CertificateError):
        secure_socket(
            far, make_credentials(), peer_certificate=make_credentials().certificate, is_server=True, timeout_seconds=10
        )


def test_a_silent_client_is_dropped_at_the_deadline(tcp_pair):
    near, far = tcp_pair()
    with pytest.raises(TimeoutError):
        secure_socket(
            far,
            make_credentials(),
            peer_certificate=make_credentials().certificate,
            is_server=True,
            timeout_seconds=0.05,
        )
    assert near.recv(1) == b""


def test_bytes_that_are_no_certificate_are_refused_and_the_connection_closed(tcp_pair):
    near, far = tcp_pair()
    with pytest.raises(CertificateError, match="cannot be parsed"):
        secure_socket(far, make_credentials(), peer_certificate=b"nonsense", is_server=True, timeout_seconds=1)
    assert near.recv(1) == b""


def test_a_private_key_is_not_in_the_repr():
    credentials = make_credentials()
    assert "PRIVATE" not in repr(credentials)
