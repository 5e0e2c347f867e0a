"""What a rendezvous established: the run, this rank's place in it, and who the others are. Values only."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from flare_transport.certificates import Credentials
from flare_transport.handshake import Proven
from flare_transport.handshake_messages import Security
from flare_transport.link import Link

__all__ = ["Group", "Peer", "PeerIdentity", "Session", "identity_of"]


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who is at the other end of a control link. Addresses are those of that connection, as text without port.

    `certificate` is DER, empty where links are plaintext.
    """

    rank: int
    remote_address: str
    local_address: str
    certificate: bytes
    certificate_digest: bytes


@dataclass(frozen=True, slots=True)
class Session:
    """One run of the group as this rank sees it. `run_id` is 16 bytes drawn by rank zero, the same on every rank."""

    run_id: bytes
    rank: int
    world_size: int
    security: Security
    key: bytes = field(repr=False)
    credentials: Credentials | None

    @property
    def certificate(self) -> bytes:
        """This rank's certificate (DER), empty where links are plaintext."""
        return b"" if self.credentials is None else self.credentials.certificate


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank and the control link to it, not yet started."""

    identity: PeerIdentity
    link: Link


@dataclass(frozen=True, slots=True)
class Group:
    """The outcome of a rendezvous. On rank zero `peers` holds every other rank; on a peer, rank zero alone."""

    session: Session
    peers: Mapping[int, Peer]

    def close(self) -> None:
        """Close every control link."""
        for peer in self.peers.values():
            peer.link.close()


def identity_of(sock: socket.socket, proven: Proven) -> PeerIdentity:
    """Return who is at the other end of an authenticated connection; raises `OSError` if that has just gone."""
    return PeerIdentity(
        proven.rank,
        str(sock.getpeername()[0]),
        str(sock.getsockname()[0]),
        proven.certificate,
        proven.certificate_digest,
    )
