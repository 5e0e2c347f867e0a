"""Opens one more link per peer after the rendezvous, as the record link is. Both ends; knows nothing of records.

Rank zero listens, for each peer, on the local address of that peer's control connection, and takes a connection only
from that peer's address, over TLS with the certificates pinned at the rendezvous, with the proof of `second_link`.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from flare_transport.address import Address, listen_on, resolve
from flare_transport.certificates import secure_socket
from flare_transport.channel import set_link_options
from flare_transport.errors import AddressError, CertificateError, RemoteProtocolError, SecondLinkError
from flare_transport.failpoint import failpoint
from flare_transport.frame_types import LINK_ACCEPT, LINK_PROOF, by_code
from flare_transport.framing import FrameDecoder, FrameType, encode_frame
from flare_transport.greeting import Caller, GreetingSettings, Reception
from flare_transport.handshake_messages import NONCE_BYTES
from flare_transport.link import Link, LinkSettings
from flare_transport.second_link import LinkOffer, dialler_proof, listener_proof
from flare_transport.session import PeerIdentity, Session
from flare_transport.timed_socket import TimedSocket

__all__ = ["LinkListener", "dial_link", "open_link_listener"]

_LOG = logging.getLogger(__name__)


class LinkListener:
    """Rank zero's listeners for one purpose, by `open_link_listener`. Send `offers[rank]` to each peer, then `accept`.

    `close` is idempotent and leaves accepted links alone.
    """

    def __init__(
        self,
        session: Session,
        peers: Sequence[PeerIdentity],
        listeners: Sequence[socket.socket],
        offers: Mapping[int, LinkOffer],
        settings: GreetingSettings,
    ) -> None:
        self._session = session
        self._peers = peers
        self._listeners = listeners
        self._settings = settings
        self._lock = threading.Lock()
        self._used: set[int] = set()
        self._sockets: dict[int, socket.socket] = {}
        self._seen: dict[int, str] = {}
        self._fault: SecondLinkError | None = None
        self._is_closed = False
        self.offers = offers

    def accept(self, *, timeout_seconds: float = 10.0, link: LinkSettings | None = None) -> dict[int, Link]:
        """Wait until every peer has connected and proven itself; returns links by rank, not yet started.

        Raises `SecondLinkError` naming the ranks that have not come in time and what was seen in their place, or at
        once when a peer that TLS has identified fails its proof. The listeners are closed either way.
        """
        deadline = time.monotonic() + timeout_seconds
        reception = Reception(self._listeners, self._greet, self._settings)
        try:
            while len(self._taken()) < len(self._peers):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise SecondLinkError(self._describe_missing(timeout_seconds))
                reception.turn(remaining)
        except BaseException:
            self.close()
            for sock in self._sockets.values():
                sock.close()
            raise
        finally:
            reception.close()
            self.close()
        purpose = next(iter(self.offers.values())).purpose if self.offers else ""
        return {
            rank: Link(sock, name=f"{purpose} link to rank {rank}", settings=link)
            for rank, sock in sorted(self._sockets.items())
        }

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            self._is_closed = True
        for listener in self._listeners:
            listener.close()

    def _taken(self) -> dict[int, socket.socket]:
        with self._lock:
            if self._fault is not None:
                raise self._fault
            return dict(self._sockets)

    def _greet(self, caller: Caller) -> None:
        peer = self._peers[caller.listener_index]
        if caller.source != peer.remote_address:
            caller.socket.close()
            self._note(peer.rank, f"a connection from {caller.source}, which is not {peer.remote_address}")
            return
        timed = TimedSocket(caller.socket, caller.deadline)
        is_identified = False
        try:
            # Whoever says anything goes after those who say nothing: TLS takes a while, and its place must last.
            timed.await_first()
            caller.progress = 1
            if self._session.credentials is not None:
                timed.socket = secure_socket(
                    caller.socket,
                    self._session.credentials,
                    peer_certificate=peer.certificate,
                    is_server=True,
                    timeout_seconds=timed.remaining_seconds(),
                )
                is_identified = True
            caller.progress = 2
            self._check_proof(caller, timed, peer)
        except (OSError, CertificateError, RemoteProtocolError) as error:
            timed.socket.close()
            self._note(peer.rank, f"its proof could not be read: {error}", is_fault=is_identified)

    def _check_proof(self, caller: Caller, timed: TimedSocket, peer: PeerIdentity) -> None:
        offer = self.offers[peer.rank]
        shown = _receive_frame(timed, LINK_PROOF)
        if not hmac.compare_digest(shown, dialler_proof(self._session, offer.purpose, peer.rank, offer.nonce)):
            raise RemoteProtocolError("the proof is wrong")
        with self._lock:
            if peer.rank in self._used or not caller.keep():
                raise RemoteProtocolError("the offer was used before")
            self._used.add(peer.rank)
        failpoint("record-link.accept")
        timed.send(encode_frame(LINK_ACCEPT, listener_proof(self._session, offer.purpose, peer.rank, offer.nonce)))
        with self._lock:
            if self._is_closed:
                raise RemoteProtocolError("it came too late")
            self._sockets[peer.rank] = timed.socket

    def _note(self, rank: int, detail: str, *, is_fault: bool = False) -> None:
        with self._lock:
            is_new = self._seen.get(rank) != detail
            self._seen[rank] = detail
            if is_fault and rank not in self._sockets and self._fault is None:
                self._fault = SecondLinkError(f"rank {rank} connected, but {detail}")
        if is_new:  # who comes again and again fills no log
            _LOG.warning("a second connection was turned away in the place of rank %d: %s", rank, detail)

    def _describe_missing(self, timeout_seconds: float) -> str:
        with self._lock:
            missing = [peer.rank for peer in self._peers if peer.rank not in self._sockets]
            reports = [f"rank {rank} ({self._seen.get(rank, 'nothing came')})" for rank in missing]
        return f"no second connection within {timeout_seconds:g} s from {', '.join(reports)}"


def open_link_listener(
    session: Session, peers: Sequence[PeerIdentity], *, purpose: str, settings: GreetingSettings | None = None
) -> LinkListener:
    """Listen for one connection of each peer (as rank zero); raises `AddressError`."""
    listeners: list[socket.socket] = []
    offers: dict[int, LinkOffer] = {}
    try:
        for peer in peers:
            listener = listen_on(Address(peer.local_address, 0))
            listeners.append(listener)
            port = int(listener.getsockname()[1])
            offers[peer.rank] = LinkOffer(purpose, peer.local_address, port, secrets.token_bytes(NONCE_BYTES))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return LinkListener(session, peers, listeners, offers, settings or GreetingSettings())


def dial_link(
    session: Session,
    rank_zero: PeerIdentity,
    offer: LinkOffer,
    *,
    timeout_seconds: float = 10.0,
    link: LinkSettings | None = None,
) -> Link:
    """Open the second connection that rank zero offered (as a peer); returns a link not yet started.

    It is dialled from the local address of the control connection. Raises `SecondLinkError`.
    """
    name = f"{offer.purpose} link to rank 0"
    try:
        sock = _dial(session, rank_zero, offer, time.monotonic() + timeout_seconds)
    except (OSError, AddressError, CertificateError, RemoteProtocolError) as error:
        where = Address(offer.host, offer.port)
        raise SecondLinkError(f"{name} could not be opened at {where}: {error}") from error
    return Link(sock, name=name, settings=link)


def _dial(session: Session, rank_zero: PeerIdentity, offer: LinkOffer, deadline: float) -> socket.socket:
    family, sockaddr = resolve(Address(offer.host, offer.port))[0]
    _, source = resolve(Address(rank_zero.local_address, 0))[0]
    with contextlib.ExitStack() as undo:
        timed = TimedSocket(socket.socket(family, socket.SOCK_STREAM), deadline)
        undo.callback(timed.socket.close)
        set_link_options(timed.socket)
        timed.socket.bind(source)
        failpoint("record-link.connect")
        timed.socket.settimeout(timed.remaining_seconds())
        timed.socket.connect(sockaddr)
        if session.credentials is not None:
            timed.socket = secure_socket(
                timed.socket,
                session.credentials,
                peer_certificate=rank_zero.certificate,
                is_server=False,
                timeout_seconds=timed.remaining_seconds(),
            )
            undo.callback(timed.socket.close)
        timed.send(encode_frame(LINK_PROOF, dialler_proof(session, offer.purpose, session.rank, offer.nonce)))
        shown = _receive_frame(timed, LINK_ACCEPT)
        if not hmac.compare_digest(shown, listener_proof(session, offer.purpose, session.rank, offer.nonce)):
            raise RemoteProtocolError("rank zero did not prove that the offer is its own")
        undo.pop_all()
    return timed.socket


def _receive_frame(timed: TimedSocket, frame_type: FrameType) -> bytes:
    """Read one frame of this type, and not a byte more; raises `OSError` and `RemoteProtocolError`."""
    decoder = FrameDecoder(by_code(frame_type))
    while True:
        for frame in decoder.receive(timed.receive(decoder.num_bytes_wanted)):
            return bytes(frame.payload)
