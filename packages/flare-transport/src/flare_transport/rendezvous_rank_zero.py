"""Rank zero's side of the rendezvous: a listener, a table of seats, and a deadline. Protocol is in `handshake`."""

import contextlib
import secrets
import socket
import threading
import time
from dataclasses import dataclass

from flare_transport.address import listen_on
from flare_transport.certificates import make_credentials, secure_socket
from flare_transport.errors import CertificateError, RemoteProtocolError, RendezvousError
from flare_transport.failpoint import failpoint
from flare_transport.frame_types import COMPLETE, REFUSE
from flare_transport.framing import encode_frame
from flare_transport.greeting import Caller, Reception
from flare_transport.handshake import HandshakeSettings, HandshakeState, Proven, RankZeroHandshake
from flare_transport.handshake_messages import NONCE_BYTES, RUN_ID_BYTES, Refusal, RefusalCode, Security
from flare_transport.link import Link
from flare_transport.rendezvous_settings import Observer, RendezvousSettings, Sighting
from flare_transport.session import Group, Peer, PeerIdentity, Session, identity_of
from flare_transport.timed_socket import ConnectionCutError, TimedSocket

__all__ = ["gather"]

_LAST_WORD_SECONDS = 1.0
_NUM_REMEMBERED = 5
_MAX_READS_AFTER_REFUSAL = 16
_PROGRESS = {HandshakeState.PROOF_DUE: 1, HandshakeState.PROVEN: 2}


@dataclass(frozen=True, slots=True)
class _Seated:
    """A rank that has joined, and its secured connection."""

    socket: socket.socket
    identity: PeerIdentity


class _Seats:
    """Who holds which rank. The first to prove a rank holds it until its connection ends; nobody replaces it."""

    def __init__(self, world_size: int) -> None:
        self._lock = threading.Lock()
        self._free = set(range(1, world_size))
        self._seated: dict[int, _Seated] = {}
        self._unwatched: list[_Seated] = []
        self._is_closed = False

    def claim(self, rank: int) -> bool:
        """Reserve the rank for a caller that proved it; returns whether it was free."""
        with self._lock:
            if rank not in self._free:
                return False
            self._free.remove(rank)
            return True

    def release(self, rank: int) -> None:
        """Give back a rank whose holder is gone."""
        with self._lock:
            self._seated.pop(rank, None)
            self._free.add(rank)

    def seat(self, seated: _Seated) -> bool:
        """The caller that claimed the rank is secured; returns False if the rendezvous is over."""
        with self._lock:
            if self._is_closed:
                return False
            self._seated[seated.identity.rank] = seated
            self._unwatched.append(seated)
            return True

    def take_unwatched(self) -> list[_Seated]:
        """Return those seated since the last call."""
        with self._lock:
            unwatched, self._unwatched = self._unwatched, []
            return unwatched

    def close(self) -> dict[int, _Seated]:
        """Seat nobody from now on; returns who sits."""
        with self._lock:
            self._is_closed = True
            return dict(self._seated)

    def ranks(self) -> set[int]:
        """Which ranks have joined."""
        with self._lock:
            return set(self._seated)


class _Host:
    """One rendezvous as rank zero runs it."""

    def __init__(self, settings: RendezvousSettings, session: Session, observe: Observer) -> None:
        self._settings = settings
        self._session = session
        self._observe = observe
        self._seats = _Seats(settings.world_size)
        self._lock = threading.Lock()
        self._turned_away: dict[str, None] = {}

    def gather(self) -> None:
        """Accept until every seat is taken; raises `RendezvousError` once the deadline has passed."""
        deadline = time.monotonic() + self._settings.deadline_seconds
        watched: dict[int, _Seated] = {}
        with contextlib.closing(listen_on(self._settings.address)) as listener:
            failpoint("rendezvous.listen")
            reception = Reception([listener], self._greet, self._settings.greeting)
            try:
                while True:
                    for seated in self._seats.take_unwatched():
                        watched[seated.socket.fileno()] = seated
                        reception.watch(seated.socket.fileno())
                    is_full = len(watched) == self._settings.world_size - 1
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 and not is_full:
                        raise RendezvousError(self._describe_missing())
                    # When all seats are taken, one look shows whether everybody still sits.
                    left = reception.turn(0.0 if is_full else remaining)
                    if is_full and not left:
                        return
                    for descriptor in left:
                        reception.forget(descriptor)
                        self._lose(watched.pop(descriptor))
            finally:
                reception.close()

    def complete(self) -> Group:
        """Tell every peer that all have come."""
        seated = self._seats.close()
        for rank, seat in sorted(seated.items()):
            try:
                TimedSocket(seat.socket, time.monotonic() + _LAST_WORD_SECONDS).send(encode_frame(COMPLETE))
            except OSError as error:
                raise RendezvousError(f"rank {rank} left just as the last rank came: {error}") from error
        settings = self._settings.link
        peers = {
            rank: Peer(seat.identity, Link(seat.socket, name=f"control link to rank {rank}", settings=settings))
            for rank, seat in sorted(seated.items())
        }
        return Group(self._session, peers)

    def dismiss(self) -> None:
        """Give up: tell those who came, and close their connections."""
        seated = self._seats.close()
        refusal = Refusal(RefusalCode.INCOMPLETE, self._settings.world_size, len(seated) + 1)
        for seat in seated.values():
            with contextlib.suppress(OSError):
                TimedSocket(seat.socket, time.monotonic() + _LAST_WORD_SECONDS).send(
                    encode_frame(REFUSE, refusal.encode())
                )
            seat.socket.close()

    def _greet(self, caller: Caller) -> None:
        timed = TimedSocket(caller.socket, caller.deadline)
        machine = RankZeroHandshake(
            HandshakeSettings(
                self._session.key,
                self._session.world_size,
                self._session.security,
                secrets.token_bytes(NONCE_BYTES),
                self._session.certificate,
            ),
            self._session.run_id,
        )
        try:
            while machine.outcome is None:
                answer = machine.receive(timed.receive(machine.num_bytes_wanted))
                if answer:
                    failpoint("rendezvous.welcome")
                timed.send(answer)
                caller.progress = _PROGRESS.get(machine.state, 0)
            if isinstance(machine.outcome, Proven) and not self._seats.claim(machine.outcome.rank):
                rank = machine.outcome.rank
                timed.send(machine.refuse(Refusal(RefusalCode.DUPLICATE_RANK, received=rank)))
            if isinstance(machine.outcome, Refusal):
                self._turn_away(caller, machine.outcome.describe())
                _close_gently(timed)
                return
        except (OSError, RemoteProtocolError) as error:
            self._turn_away(caller, str(error))
            caller.socket.close()
            return
        self._secure(caller, timed, machine, machine.outcome)

    def _secure(self, caller: Caller, timed: TimedSocket, machine: RankZeroHandshake, proven: Proven) -> None:
        """Accept a caller whose rank is claimed, and seat it once TLS shows the same certificate."""
        sock = caller.socket
        try:
            failpoint("rendezvous.accept")
            timed.send(machine.accept())
            if self._session.credentials is not None:
                sock = secure_socket(
                    sock,
                    self._session.credentials,
                    peer_certificate=proven.certificate,
                    is_server=True,
                    timeout_seconds=timed.remaining_seconds(),
                )
            identity = identity_of(sock, proven)
            if not caller.keep():
                raise ConnectionCutError("sent away to make room")
        except (OSError, CertificateError) as error:
            sock.close()
            self._seats.release(proven.rank)
            self._turn_away(caller, str(error), proven.rank)
            return
        if self._seats.seat(_Seated(sock, identity)):
            self._observe(Sighting(caller.source, proven.rank, "joined", has_joined=True))
        else:
            sock.close()

    def _lose(self, seated: _Seated) -> None:
        seated.socket.close()
        self._seats.release(seated.identity.rank)
        detail = "left before every rank had come"
        self._observe(Sighting(seated.identity.remote_address, seated.identity.rank, detail))

    def _turn_away(self, caller: Caller, detail: str, rank: int | None = None) -> None:
        with self._lock:
            self._turned_away[f"{caller.source}: {detail}"] = None
            while len(self._turned_away) > _NUM_REMEMBERED:
                self._turned_away.pop(next(iter(self._turned_away)))
        self._observe(Sighting(caller.source, rank, detail))

    def _describe_missing(self) -> str:
        missing = [rank for rank in range(1, self._settings.world_size) if rank not in self._seats.ranks()]
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        text = f"{ranks} did not come to {self._settings.address} within {self._settings.deadline_seconds:g} s"
        with self._lock:
            turned_away = list(self._turned_away)
        return f"{text}; turned away: {'; '.join(turned_away)}" if turned_away else text


def gather(settings: RendezvousSettings, observe: Observer) -> Group:
    """Meet every peer as rank zero; see `rendezvous.meet`."""
    is_tls = settings.security is Security.TLS and settings.world_size > 1
    session = Session(
        secrets.token_bytes(RUN_ID_BYTES),
        0,
        settings.world_size,
        settings.security,
        settings.key,
        make_credentials() if is_tls else None,
    )
    if settings.world_size == 1:
        return Group(session, {})
    host = _Host(settings, session, observe)
    try:
        host.gather()
        failpoint("rendezvous.met")
        return host.complete()
    except BaseException:
        host.dismiss()
        raise


def _close_gently(timed: TimedSocket) -> None:
    """Close after the other side has: closing over bytes not yet read would reset away the refusal just sent."""
    with contextlib.closing(timed.socket), contextlib.suppress(OSError):
        timed.socket.shutdown(socket.SHUT_WR)
        for _ in range(_MAX_READS_AFTER_REFUSAL):
            timed.receive(4096)
