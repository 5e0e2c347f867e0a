"""The manager's end of a bulk connection: ranges of shards sent from memory or storage, or received into memory.

Runs in the connection's own thread. Which transfer may move what is the core's to say.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from flare_cache.host_memory import aligned_buffer
from flare_cache.pool.core_words import Transfer
from flare_cache.pool.landings import Landings
from flare_cache.pool.memory_tier import MemoryTier
from flare_cache.pool.storage import PoolStorage
from flare_transport import BulkUnit, RemoteProtocolError, ServiceSession, UnitAnswer, UnitOp, UnitStatus, transfer_key
from flare_transport.bulk_socket import receive_into, receive_unit, send_all, set_bulk_options

__all__ = ["BulkService"]

_READ_BYTES = 2 << 20
"""From storage at a time: it is sent while it is still in a cache."""
_WRITE_BYTES = 4 << 20
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class BulkService:
    """See the module.

    Attributes:
        storage, memory: where shards are.
        claim: gives a range of a transfer out once; the transfer, or None where the session may not have it.
        received: says that so many bytes of a transfer have come.
        landings: where a put's bytes go.
    """

    storage: PoolStorage
    memory: MemoryTier
    claim: Callable[[bytes, BulkUnit], Transfer | None]
    received: Callable[[Transfer, int], None]
    landings: Landings
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    _sockets: set[socket.socket] = field(default_factory=set)

    def serve(self, sock: socket.socket, session: ServiceSession) -> None:
        """Serve units until the other side closes the connection, or something is wrong with it."""
        self._sockets.add(set_bulk_options(sock))
        buffer = aligned_buffer(_READ_BYTES)
        try:
            while (unit := receive_unit(sock)) is not None:
                if not self._serve_unit(sock, session, unit, buffer):
                    return
        except (OSError, RemoteProtocolError) as error:
            _log.debug("a bulk connection has ended: %s", error)
        finally:
            self._sockets.discard(sock)

    def close(self) -> None:
        """Cut every connection; their threads end."""
        for sock in list(self._sockets):
            try:
                # Not the TLS socket's own shutdown, which would leave its reader without TLS.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                continue

    def _serve_unit(self, sock: socket.socket, session: ServiceSession, unit: BulkUnit, buffer: memoryview) -> bool:
        """Whether the connection may go on. ``buffer`` is the connection's own."""
        transfer = self.claim(session.id, unit) if unit.is_proven(transfer_key(session.key, unit.transfer)) else None
        if transfer is None:
            send_all(sock, memoryview(UnitAnswer(UnitStatus.UNKNOWN).encode()))
            return False
        if unit.op is UnitOp.PUT:
            return self._receive(sock, transfer, unit)
        return self._send(sock, transfer, unit, buffer)

    def _receive(self, sock: socket.socket, transfer: Transfer, unit: BulkUnit) -> bool:
        """Into memory, and on to storage piece by piece: the disk works while the network does. What storage says of it
        is told when the put is finished."""
        try:
            landing = self.landings.of(transfer)
            for at in range(unit.offset, unit.offset + unit.length, _WRITE_BYTES):
                view = landing.data[at : min(at + _WRITE_BYTES, unit.offset + unit.length)]
                receive_into(sock, view)
                landing.write(at, view)
            landing.check.arrived(unit.offset, unit.length)
        except (TimeoutError, ConnectionError):
            raise
        except OSError as error:
            _log.warning("%s cannot be stored: %s", transfer.name, error)
            send_all(sock, memoryview(UnitAnswer(UnitStatus.FAILED).encode()))
            return False
        self.num_bytes_received += unit.length
        self.received(transfer, unit.length)
        send_all(sock, memoryview(UnitAnswer(UnitStatus.OK).encode()))
        return True

    def _send(self, sock: socket.socket, transfer: Transfer, unit: BulkUnit, buffer: memoryview) -> bool:
        held = self.memory.get(transfer.name)
        if held is not None:
            send_all(sock, memoryview(UnitAnswer(UnitStatus.OK, unit.length).encode()))
            send_all(sock, held[unit.offset : unit.offset + unit.length])
            self.num_bytes_sent += unit.length
            return True
        return self._send_stored(sock, transfer, unit, buffer)

    def _send_stored(self, sock: socket.socket, transfer: Transfer, unit: BulkUnit, buffer: memoryview) -> bool:
        """From storage, piece by piece; once the answer is sent, a failure can only cut the connection."""
        for at in range(0, unit.length, _READ_BYTES):
            view = buffer[: min(_READ_BYTES, unit.length - at)]
            try:
                self.storage.read(transfer.name, unit.offset + at, view)
            except OSError as error:
                _log.warning("%s cannot be read: %s", transfer.name, error)
                if not at:
                    send_all(sock, memoryview(UnitAnswer(UnitStatus.FAILED).encode()))
                return False
            if not at:
                send_all(sock, memoryview(UnitAnswer(UnitStatus.OK, unit.length).encode()))
            send_all(sock, view)
        self.num_bytes_sent += unit.length
        return True
