"""All-gather of small byte strings through rank zero, over the control links. Knows nothing of what the bytes mean.

A round is numbered; rank zero collects one part per rank and sends the whole to all from whichever thread brought the
last part, so that no thread is woken only to forward.
"""

import struct
import threading

from flare_transport.errors import LinkLost, LocalProtocolError, QueueFull, RemoteProtocolError
from flare_transport.frame_types import EXCHANGE_PART, EXCHANGE_WHOLE
from flare_transport.framing import Buffer
from flare_transport.link import Link
from flare_transport.router import LinkEnd, Router

__all__ = ["StarExchange"]

_ROUND = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")


class StarExchange:
    """One rank's end. Every rank must call `all_gather` the same number of times, in one thread at a time.

    Call `attach` for each control link (rank zero: one per peer) before it starts.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._num_called = 0
        self._num_gathered = 0
        self._parts: dict[int, bytes] = {}
        self._wholes: dict[int, list[bytes]] = {}
        self._lost: str | None = None

    def attach(self, rank: int, link: Link, router: Router) -> None:
        """Exchange with this rank over this link."""
        self._links[rank] = link
        if self._rank == 0:
            router.route(EXCHANGE_PART, lambda _, payload: self._receive_part(rank, payload))
        else:
            router.route(EXCHANGE_WHOLE, self._receive_whole)
        router.on_end(self._lose)

    def all_gather(self, part: Buffer, *, timeout_seconds: float | None = None) -> list[bytes]:
        """Give this rank's part; returns every rank's, by rank. Blocks until all have come.

        Raises `LinkLost` if a link ends first or a round before timed out, `TimeoutError`, `QueueFull`, and
        `LocalProtocolError` for a part so large that the parts of all ranks could not be sent as one frame.
        """
        self._check_size(len(part), LocalProtocolError)
        with self._changed:
            if self._lost is not None:
                raise LinkLost(self._lost)
            number = self._num_called
            self._num_called += 1
        if self._rank == 0:
            self._add_part(0, number, bytes(part))
        else:
            self._links[0].send(EXCHANGE_PART, _ROUND.pack(number) + part)
        with self._changed:
            arrived = self._changed.wait_for(lambda: number in self._wholes or self._lost, timeout_seconds)
            if number in self._wholes:
                return self._wholes.pop(number)
            if not arrived:
                self._lost = f"not every rank's part of exchange {number} came within {timeout_seconds} s"
                raise TimeoutError(self._lost)
            raise LinkLost(str(self._lost))

    def _receive_part(self, rank: int, payload: memoryview) -> None:
        if len(payload) < _ROUND.size:
            raise RemoteProtocolError("an exchange part is shorter than its number")
        (number,) = _ROUND.unpack_from(payload)
        self._check_size(len(payload) - _ROUND.size, RemoteProtocolError)
        self._add_part(rank, number, bytes(payload[_ROUND.size :]))

    def _add_part(self, rank: int, number: int, part: bytes) -> None:
        """Take one rank's part (on rank zero); whoever brings the last one sends the whole."""
        with self._changed:
            if number != self._num_gathered or rank in self._parts:
                raise RemoteProtocolError(f"rank {rank} sent a part of exchange {number} out of turn")
            self._parts[rank] = part
            if len(self._parts) < self._world_size:
                return
            whole = [self._parts[index] for index in range(self._world_size)]
            self._parts = {}
            self._num_gathered += 1
            self._keep(number, whole)
            frame = b"".join([_ROUND.pack(number), *(_LENGTH.pack(len(each)) + each for each in whole)])
            for link in self._links.values():
                _pass_on(link, frame)

    def _receive_whole(self, link: Link, payload: memoryview) -> None:
        del link
        number, whole = _split_whole(payload, self._world_size)
        with self._changed:
            if number != self._num_gathered or number >= self._num_called:
                raise RemoteProtocolError(f"the parts of exchange {number} came out of turn")
            self._num_gathered += 1
            self._keep(number, whole)

    def _keep(self, number: int, whole: list[bytes]) -> None:
        self._wholes[number] = whole
        self._changed.notify_all()

    def _lose(self, link: Link, end: LinkEnd) -> None:
        del link
        with self._changed:
            self._lost = self._lost or end.detail
            self._changed.notify_all()

    def _check_size(self, num_bytes: int, fault: type[LocalProtocolError | RemoteProtocolError]) -> None:
        """Refuse a part of which one per rank would not fit one frame."""
        if _ROUND.size + self._world_size * (_LENGTH.size + num_bytes) > EXCHANGE_WHOLE.max_bytes:
            raise fault(f"a part of {num_bytes} bytes is too large to gather from {self._world_size} ranks")


def _pass_on(link: Link, frame: bytes) -> None:
    try:
        link.send(EXCHANGE_WHOLE, frame)
    except QueueFull as error:
        link.fail(f"does not read what it exchanges: {error}")
    except LinkLost:
        return  # its end listener tells whoever waits


def _split_whole(payload: memoryview, world_size: int) -> tuple[int, list[bytes]]:
    try:
        (number,) = _ROUND.unpack_from(payload)
        position, parts = _ROUND.size, []
        for _ in range(world_size):
            (length,) = _LENGTH.unpack_from(payload, position)
            position += _LENGTH.size
            parts.append(bytes(payload[position : position + length]))
            position += length
    except struct.error:
        raise RemoteProtocolError("the parts of an exchange are cut short") from None
    if position != len(payload):
        raise RemoteProtocolError("the parts of an exchange do not add up to their frame")
    return number, parts
