"""Units of bulk transfers: a request for one range of one transfer, proven by HMAC, and its answer. No I/O.

A transfer is granted over a session's control link by its id alone; its key is derived on both sides and never sent.
A range is asked for at most once. What bytes mean is not known here.
"""

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from flare_transport.errors import RemoteProtocolError
from flare_transport.keys import derive_key

__all__ = [
    "ANSWER_BYTES",
    "TRANSFER_ID_BYTES",
    "UNIT_BYTES",
    "BulkUnit",
    "UnitAnswer",
    "UnitOp",
    "UnitStatus",
    "transfer_key",
    "unit_mac",
]

TRANSFER_ID_BYTES = 16
_UNIT = struct.Struct("<B7x16sQQ32s")
_ANSWER = struct.Struct("<B7xQ")
UNIT_BYTES = _UNIT.size
ANSWER_BYTES = _ANSWER.size


class UnitOp(IntEnum):
    """GET: the service sends the range. PUT: the client's bytes follow the request."""

    GET = 1
    PUT = 2


class UnitStatus(IntEnum):
    """What became of a unit. Anything but OK ends the connection after the answer."""

    OK = 0
    UNKNOWN = 1
    REFUSED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class BulkUnit:
    """A request: bytes [offset, offset + length) of the transfer's object."""

    op: UnitOp
    transfer: bytes
    offset: int
    length: int
    mac: bytes

    def encode(self) -> bytes:
        """`UNIT_BYTES` bytes."""
        return _UNIT.pack(self.op, self.transfer, self.offset, self.length, self.mac)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "BulkUnit":
        """Parse `UNIT_BYTES` bytes; raises `RemoteProtocolError`. The MAC is the caller's to check."""
        op, transfer, offset, length, mac = _UNIT.unpack(data)
        try:
            return cls(UnitOp(op), transfer, offset, length, mac)
        except ValueError:
            raise RemoteProtocolError(f"a bulk unit with the unknown operation {op}") from None

    @classmethod
    def make(cls, key: bytes, op: UnitOp, transfer: bytes, *, offset: int, length: int) -> "BulkUnit":
        """A request with its proof. `key` is the transfer's."""
        return cls(op, transfer, offset, length, unit_mac(key, op, transfer, offset=offset, length=length))

    def is_proven(self, key: bytes) -> bool:
        """Whether whoever made it knows the transfer's key."""
        expected = unit_mac(key, self.op, self.transfer, offset=self.offset, length=self.length)
        return hmac.compare_digest(self.mac, expected)


@dataclass(frozen=True, slots=True)
class UnitAnswer:
    """The service's answer; for a GET that is OK, `length` bytes follow."""

    status: UnitStatus
    length: int = 0

    def encode(self) -> bytes:
        """`ANSWER_BYTES` bytes."""
        return _ANSWER.pack(self.status, self.length)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "UnitAnswer":
        """Parse `ANSWER_BYTES` bytes; raises `RemoteProtocolError`."""
        status, length = _ANSWER.unpack(data)
        try:
            return cls(UnitStatus(status), length)
        except ValueError:
            raise RemoteProtocolError(f"a bulk answer with the unknown status {status}") from None


def transfer_key(session_key: bytes, transfer: bytes) -> bytes:
    """The key of one transfer, on either side."""
    return derive_key(session_key, "flare/1/transfer", salt=transfer)


def unit_mac(key: bytes, op: UnitOp, transfer: bytes, *, offset: int, length: int) -> bytes:
    """The proof of one unit."""
    return hmac.digest(key, _UNIT.pack(op, transfer, offset, length, bytes(32)), "sha256")
