"""Everything that crosses the network while ranks meet, as a proxy between them sees it: no secret is in it."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization

from flare_transport import (
    Address,
    RendezvousSettings,
    Security,
    derive_key,
    dial_link,
    generate_key,
    meet,
    open_link_listener,
)
from flare_transport.frame_types import HELLO
from flare_transport.handshake import rendezvous_key

SALT = b"a tenant's salt, 32 bytes long.."
TOKEN = b"Bearer an-api-key-of-a-tenant"


@dataclass
class Proxy:
    """Passes bytes on between whoever connects and `target`, and keeps them."""

    target: Address
    seen: bytearray = field(default_factory=bytearray)
    passing: list[socket.socket] = field(default_factory=list)
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self):
        self._start(self._serve)

    def _start(self, target, *arguments):
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    def close(self):
        """Close everything; a socket that a thread still reads from is shut first, so that the thread ends."""
        for sock in (self.listener, *self.passing):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(20)
        for sock in (self.listener, *self.passing):
            sock.close()

    def _serve(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((self.target.host, self.target.port))
            except OSError:  # rank zero is not there yet: the peer comes again
                near.close()
                continue
            self.passing += [near, far]
            for source, sink in ((near, far), (far, near)):
                self._start(self._pass_on, source, sink)

    def _pass_on(self, source, sink):
        try:
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)
        except OSError:
            pass
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def forms(secret: bytes) -> list[bytes]:
    """A secret as bytes and as text."""
    import base64

    return [secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret)]


@pytest.mark.parametrize("security", Security)
def test_no_secret_crosses_the_network_while_ranks_meet_and_work(security, loopback_address, closing, make_recorder):
    key = bytes.fromhex(generate_key())
    proxy = Proxy(loopback_address)
    closing.append(proxy)
    place = RendezvousSettings(loopback_address, 0, 2, key, security=security, deadline_seconds=20)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(meet, place)
        peer = meet(replace(place, rank=1, address=Address("127.0.0.1", proxy.port)))
        zero = waiting.result()
        closing += [zero, peer]
        listener = open_link_listener(zero.session, [zero.peers[1].identity], purpose="records")
        offer = listener.offers[1]
        second = Proxy(Address(offer.host, offer.port))
        closing.append(second)
        accepting = pool.submit(listener.accept)
        dialled = dial_link(
            peer.session, peer.peers[0].identity, msgspec.structs.replace(offer, port=second.port), timeout_seconds=20
        )
        (accepted,) = accepting.result().values()
    closing += [dialled, accepted]
    for far, near in ((dialled, accepted), (peer.peers[0].link, zero.peers[1].link)):
        recorders = make_recorder(), make_recorder()
        far.start(recorders[0].router)
        near.start(recorders[1].router)
        near.send(make_recorder.WORD, SALT + TOKEN)
        assert recorders[0].word() == SALT + TOKEN
    seen = bytes(proxy.seen + second.seen)
    assert len(seen) > 400
    secrets = [key, rendezvous_key(key), derive_key(key, "flare/salt/1")]
    secrets.append(derive_key(key, "flare/1/link/records", salt=zero.session.run_id))
    if security is Security.TLS:
        # What the links carry is hidden, the offer's nonce among it; without TLS it is not, as SECURITY.md says.
        secrets += [SALT, TOKEN, *(group.session.credentials.private_key for group in (zero, peer))]
        secrets += [_private_number(group.session.credentials) for group in (zero, peer)]
    for secret in secrets:
        for form in forms(secret):
            assert form not in seen
    assert (SALT in seen) is (security is Security.PLAINTEXT)
    assert HELLO.code in seen


def _private_number(credentials) -> bytes:
    key = serialization.load_pem_private_key(credentials.private_key, None)
    return key.private_numbers().private_value.to_bytes(32, "big")
