"""TLS 1.3 between two sides that already authenticated each other's certificate. Owns ephemeral certificates, contexts.

A certificate lives in memory for one run. Each side trusts exactly one certificate, the other side's, and compares
its digest again after the handshake. Knows nothing of ranks. `ssl` and `cryptography` are loaded on first use, so that
plaintext links and command lines do without them.
"""

import contextlib
import os
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from flare_transport.errors import CertificateError
from flare_transport.handshake_messages import certificate_digest

__all__ = ["Credentials", "make_credentials", "secure_socket"]

if TYPE_CHECKING:
    import ssl

# Hosts' clocks may differ; pinning, not the dates, ends a certificate's use.
_VALID_BEFORE = timedelta(days=1)
_VALID_AFTER = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A self-signed certificate (DER) and its private key (PEM). The key never leaves the process."""

    certificate: bytes
    private_key: bytes = field(repr=False)


def make_credentials(now: datetime | None = None) -> Credentials:
    """Make an ephemeral P-256 certificate, valid around `now` (the current time unless given)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    moment = now or datetime.now(UTC)
    private_key = ec.generate_private_key(ec.SECP256R1())
    # One fresh name per certificate: two with the same name would make verification try the wrong one.
    serial = x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"flare {serial:x}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private_key.public_key())
        .serial_number(serial)
        .not_valid_before(moment - _VALID_BEFORE)
        .not_valid_after(moment + _VALID_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private_key, hashes.SHA256())
    )
    return Credentials(
        certificate.public_bytes(serialization.Encoding.DER),
        private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def secure_socket(
    sock: socket.socket, credentials: Credentials, *, peer_certificate: bytes, is_server: bool, timeout_seconds: float
) -> "ssl.SSLSocket":
    """Run the TLS handshake on a connected socket; blocks for at most `timeout_seconds`.

    On success the returned socket owns the connection. Raises `CertificateError` if the other side does not show
    exactly `peer_certificate` (DER), or TLS fails otherwise, and `OSError` if the connection does; either way the
    connection is closed.
    """
    import ssl

    sock.settimeout(timeout_seconds)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        try:
            context = _context(credentials, peer_certificate, is_server=is_server)
            sock.getpeername()  # of a connection that is cut already, `ssl` makes a socket that nobody closes
            secured = context.wrap_socket(sock, server_side=is_server)
            undo.callback(secured.close)
            shown = secured.getpeercert(binary_form=True)
        except ssl.SSLCertVerificationError as error:
            raise CertificateError(f"the other side's TLS certificate is refused: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise CertificateError(f"TLS with the other side failed: {error.reason or error}") from error
        if shown is None or certificate_digest(shown) != certificate_digest(peer_certificate):
            raise CertificateError("the other side's TLS certificate is not the one that it authenticated")
        undo.pop_all()
    return secured


def _context(credentials: Credentials, peer_certificate: bytes, *, is_server: bool) -> "ssl.SSLContext":
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # no resumption: every connection shows its certificate
    try:
        context.load_verify_locations(cadata=peer_certificate)
    except ssl.SSLError as error:
        raise CertificateError("the other side's certificate cannot be parsed") from error
    # `load_cert_chain` wants a path; an anonymous file in memory has one and leaves nothing on disk.
    descriptor = os.memfd_create("flare-certificate", os.MFD_CLOEXEC)
    try:
        pem = ssl.DER_cert_to_PEM_cert(credentials.certificate).encode() + credentials.private_key
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
