"""A peer's side of the rendezvous: connect, prove, secure, wait for the others, retrying until a deadline."""

import random
import secrets
import socket
import time
from dataclasses import replace

from flare_transport.address import resolve
from flare_transport.certificates import make_credentials, secure_socket
from flare_transport.channel import set_link_options
from flare_transport.errors import (
    AddressError,
    CertificateError,
    RemoteProtocolError,
    RendezvousError,
    RendezvousRefused,
)
from flare_transport.failpoint import failpoint
from flare_transport.frame_types import COMPLETE, REFUSE, by_code
from flare_transport.framing import FrameDecoder
from flare_transport.handshake import HandshakeSettings, PeerHandshake, Proven
from flare_transport.handshake_messages import NONCE_BYTES, Refusal, RefusalCode, Security, decode_refusal
from flare_transport.link import Link
from flare_transport.rendezvous_settings import Observer, RendezvousSettings, Sighting
from flare_transport.session import Group, Peer, Session, identity_of
from flare_transport.timed_socket import TimedSocket

__all__ = ["join"]

_FIRST_PAUSE_SECONDS = 0.02
_LAST_PAUSE_SECONDS = 1.0


def join(settings: RendezvousSettings, observe: Observer) -> Group:
    """Meet rank zero and wait for the other peers; see `rendezvous.meet`."""
    deadline = time.monotonic() + settings.deadline_seconds
    credentials = make_credentials() if settings.security is Security.TLS else None
    pause_seconds = _FIRST_PAUSE_SECONDS
    seen = "nothing"
    while (now := time.monotonic()) < deadline:
        session = Session(b"", settings.rank, settings.world_size, settings.security, settings.key, credentials)
        try:
            outcome = _attempt(settings, session, deadline)
        except (OSError, AddressError, RemoteProtocolError, CertificateError) as error:
            if str(error) != seen:
                seen = str(error)
                observe(Sighting(str(settings.address), 0, seen))
        else:
            if isinstance(outcome, Group):
                observe(Sighting(str(settings.address), 0, "joined", has_joined=True))
                return outcome
            is_for_want_of_others = outcome.code is RefusalCode.INCOMPLETE
            fault = RendezvousError if is_for_want_of_others else RendezvousRefused
            raise fault(f"rank {settings.rank} cannot join at {settings.address}: {outcome.describe()}")
        # Jitter keeps the peers of a group from knocking in step.
        time.sleep(min(pause_seconds * random.uniform(0.5, 1.0), max(0.0, deadline - now)))  # noqa: S311  jitter
        pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)
    raise RendezvousError(
        f"rank {settings.rank} could not join at {settings.address} within {settings.deadline_seconds:g} s; "
        f"last seen there: {seen}"
    )


def _attempt(settings: RendezvousSettings, session: Session, deadline: float) -> Group | Refusal:
    """Connect once and go all the way; closes the connection unless it returns a group."""
    greeting_deadline = min(deadline, time.monotonic() + settings.greeting.deadline_seconds)
    timed = TimedSocket(_connect(settings, greeting_deadline), greeting_deadline)
    sock = timed.socket
    try:
        outcome = _shake_hands(timed, session)
        if isinstance(outcome, Refusal):
            sock.close()
            return outcome
        if session.credentials is not None:
            sock = secure_socket(
                sock,
                session.credentials,
                peer_certificate=outcome.certificate,
                is_server=False,
                timeout_seconds=timed.remaining_seconds(),
            )
        refusal = _await_completion(TimedSocket(sock, deadline))
        if refusal is not None:
            sock.close()
            return refusal
        failpoint("rendezvous.met")
        identity = identity_of(sock, outcome)
    except BaseException:
        sock.close()
        raise
    link = Link(sock, name="control link to rank 0", settings=settings.link)
    return Group(replace(session, run_id=outcome.run_id), {0: Peer(identity, link)})


def _connect(settings: RendezvousSettings, deadline: float) -> socket.socket:
    error = OSError("no address")
    for family, sockaddr in resolve(settings.address):
        try:
            return _connect_to(family, sockaddr, deadline)
        except OSError as failed:
            error = failed
    raise error


def _connect_to(family: int, sockaddr: tuple[object, ...], deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        set_link_options(sock)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(sockaddr)
        # Where nobody listens yet, a port from the ephemeral range may connect to itself.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("nobody listens there")
    except BaseException:
        sock.close()
        raise
    return sock


def _shake_hands(timed: TimedSocket, session: Session) -> Proven | Refusal:
    machine = PeerHandshake(
        HandshakeSettings(
            session.key, session.world_size, session.security, secrets.token_bytes(NONCE_BYTES), session.certificate
        ),
        session.rank,
    )
    failpoint("rendezvous.hello")
    timed.send(machine.start())
    while machine.outcome is None:
        answer = machine.receive(timed.receive(machine.num_bytes_wanted))
        if answer:
            failpoint("rendezvous.proof")
        timed.send(answer)
    return machine.outcome


def _await_completion(timed: TimedSocket) -> Refusal | None:
    """Wait until rank zero says that every rank has come; returns its refusal if it gave up."""
    decoder = FrameDecoder(by_code(COMPLETE, REFUSE))
    while True:
        for frame in decoder.receive(timed.receive(decoder.num_bytes_wanted)):
            return None if frame.type == COMPLETE else decode_refusal(frame.payload)
