"""Second connections between ranks that have met: the offer, and the proof that a connection belongs to it. No I/O.

Rank zero sends a peer, over the control link, an offer with a single-use nonce. Whoever connects proves with HMAC under
a key of (run, purpose) that it knows rank and nonce; rank zero answers with a proof of its own.
"""

import hmac
import struct

import msgspec

from flare_transport.keys import derive_key
from flare_transport.session import Session

__all__ = ["LinkOffer", "dialler_proof", "listener_proof"]

_SCOPE = struct.Struct("<I32s")


class LinkOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one peer may open one second connection, once. `nonce` is 32 random bytes; `purpose` names the use."""

    purpose: str
    host: str
    port: int
    nonce: bytes


def dialler_proof(session: Session, offer_purpose: str, rank: int, nonce: bytes) -> bytes:
    """Return what the connecting peer `rank` must show."""
    return _proof(session, offer_purpose, b"cli", rank, nonce)


def listener_proof(session: Session, offer_purpose: str, rank: int, nonce: bytes) -> bytes:
    """Return what rank zero answers the peer `rank` with."""
    return _proof(session, offer_purpose, b"srv", rank, nonce)


def _proof(session: Session, purpose: str, role: bytes, rank: int, nonce: bytes) -> bytes:
    key = derive_key(session.key, f"flare/1/link/{purpose}", salt=session.run_id)
    return hmac.digest(key, role + b"\0" + _SCOPE.pack(rank, nonce), "sha256")
