"""The greeting of a second connection (the record link), on real sockets, from both ends.

In plaintext, so that the input reaches the proof; with TLS a stranger fails before it. Nobody here has the key.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require
from flare_transport import (
    GreetingSettings,
    Link,
    LinkListener,
    LinkOffer,
    PeerIdentity,
    SecondLinkError,
    Security,
    Session,
    dial_link,
    encode_frame,
    open_link_listener,
)
from flare_transport.frame_types import ALL_FRAME_TYPES, LINK_ACCEPT, LINK_PROOF
from flare_transport.handshake_messages import certificate_digest
from flare_transport.second_link import dialler_proof, listener_proof

__all__ = ["GREETING"]

_KEY, _RUN = b"k" * 32, b"r" * 16
_LOOPBACK = "127.0.0.1"
_ZERO = Session(_RUN, 0, 2, Security.PLAINTEXT, _KEY, None)
_PEER = Session(_RUN, 1, 2, Security.PLAINTEXT, _KEY, None)
_SECONDS = 5.0


def _identity(rank: int) -> PeerIdentity:
    return PeerIdentity(rank, _LOOPBACK, _LOOPBACK, b"", certificate_digest(b""))


def _bytes(choices: Choices, nonce: bytes) -> bytes:
    """What a stranger may say who has overheard another run, another purpose, or the other side's proof."""
    parts: list[bytes] = []
    for _ in range(choices.integer(0, 3)):
        frame_type = choices.pick((LINK_PROOF, LINK_PROOF, LINK_ACCEPT, *ALL_FRAME_TYPES))
        way = choices.integer(0, 4)
        if way == 0:
            parts.append(choices.piece(64))
        elif way == 1:
            parts.append(encode_frame(frame_type, choices.piece(min(frame_type.max_bytes, 64))))
        else:
            other = Session(b"another run 1234", 0, 2, Security.PLAINTEXT, _KEY, None)
            proofs = (
                listener_proof(_ZERO, "records", 1, b"another nonce".ljust(32)),
                dialler_proof(other, "records", 1, nonce),
                dialler_proof(_ZERO, "other", 1, nonce),
                dialler_proof(_ZERO, "records", 2, nonce),
            )
            parts.append(encode_frame(LINK_PROOF if choices.flag() else LINK_ACCEPT, choices.pick(proofs)))
    return b"".join(parts)


@dataclass(slots=True)
class _Greeting:
    """A listener that waits for its peer all the time, and a server that answers a peer with the input."""

    listener: LinkListener
    offer: LinkOffer
    server: socket.socket

    def to_listener(self, data: bytes) -> None:
        """Nobody without the key gets a byte back, and the connection ends once it has sent nonsense or left."""
        stranger = socket.create_connection((_LOOPBACK, self.offer.port), timeout=_SECONDS)
        with stranger:
            try:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                require(stranger.recv(64) == b"", "a stranger was answered")
            except TimeoutError:
                require(False, "a stranger that has left is kept")
            except OSError:
                return  # it was cut off before it had said all

    def to_dialler(self, data: bytes) -> None:
        """A peer never takes a listener without the key for rank zero."""
        port = int(self.server.getsockname()[1])
        served = threading.Thread(target=self._serve, args=(data,), daemon=True)
        served.start()
        try:
            link = dial_link(_PEER, _identity(0), LinkOffer("records", _LOOPBACK, port, b"n" * 32), timeout_seconds=1.0)
        except SecondLinkError:
            return
        finally:
            served.join()
        link.close()
        require(False, "a peer took a listener without the key for rank zero")

    def _serve(self, data: bytes) -> None:
        sock, _ = self.server.accept()
        with sock, contextlib.suppress(OSError):
            sock.recv(4096)
            sock.sendall(data)


@contextlib.contextmanager
def _open() -> Iterator[Execute]:
    listener = open_link_listener(
        _ZERO, [_identity(1)], purpose="records", settings=GreetingSettings(deadline_seconds=1.0)
    )
    logger = logging.getLogger("flare_transport.record_listener")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it has much to tell of strangers here
    accepted: list[Link] = []
    waiter = threading.Thread(
        target=lambda: accepted.extend(listener.accept(timeout_seconds=86_400.0).values()), daemon=True
    )
    waiter.start()
    with socket.create_server((_LOOPBACK, 0)) as server:
        greeting = _Greeting(listener, listener.offers[1], server)

        def execute(data: bytes) -> None:
            choices = Choices(data)
            is_dialler = choices.flag()
            said = _bytes(choices, b"n" * 32 if is_dialler else greeting.offer.nonce)
            if is_dialler:
                greeting.to_dialler(said)
            else:
                greeting.to_listener(said)
            require(waiter.is_alive(), "the listener is gone")

        yield execute
    # Whatever came before, the right peer is still let in.
    link = dial_link(_PEER, _identity(0), greeting.offer)
    waiter.join(_SECONDS)
    require(len(accepted) == 1, "the right peer was not let in")
    for each in (link, *accepted):
        each.close()
    logger.setLevel(level)


def _seeds() -> Iterator[bytes]:
    for side in (0, 1):
        for way in range(4):
            yield bytes((side, 1, 0, 0, 4, 1, way))
        yield bytes((side, 1, 0, 0, 1, 32)) + b"m" * 32
        yield bytes((side, 3, 0, 0, 0, 20)) + b"GET / HTTP/1.1\r\n\r\n  "


GREETING = Target(
    "greeting",
    "On a second connection nobody without the key is answered or believed, and the right peer still comes in.",
    _open,
    _seeds,
    max_bytes=300,
)
