"""What an operator's tool and the manager say to each other, on the same kind of control link as ranks use.

Whoever holds the pool's key may ask; nothing here changes what is visible but ``Collect``, which removes leftovers,
and ``Verify`` with ``remove``.
"""

from __future__ import annotations

import msgspec

from flare_cache.pool.decoding import decode
from flare_transport.framing import FrameType

__all__ = [
    "POOL_ADMIN_REPLY",
    "POOL_ADMIN_REQUEST",
    "AdminReply",
    "AdminRequest",
    "Collect",
    "Collected",
    "Failed",
    "ListRecords",
    "ManagerStatus",
    "NamespaceStatus",
    "RecordLine",
    "RecordLines",
    "SessionStatus",
    "Status",
    "Verified",
    "Verify",
    "decode_admin_reply",
    "decode_admin_request",
    "encode_admin",
]

POOL_ADMIN_REQUEST = FrameType(62, "POOL_ADMIN_REQUEST", 4096)
POOL_ADMIN_REPLY = FrameType(63, "POOL_ADMIN_REPLY", 16 << 20)


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="t"):
    pass


class Status(_Message, frozen=True, kw_only=True):
    """How does the manager stand?"""


class NamespaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace: instances with equal model, world size and salt key."""

    namespace: str
    num_records: int
    num_bytes: int
    reserved_bytes: int


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that is connected."""

    instance: str
    model: str
    rank: int
    world_size: int
    namespace: str


class ManagerStatus(_Message, frozen=True, kw_only=True):
    """The manager now. ``limit_bytes``, ``quota_bytes``: None where there is none."""

    name: str
    epoch: str
    storage: str
    uptime_seconds: float
    limit_bytes: int | None
    quota_bytes: int | None
    memory_bytes: int
    memory_limit_bytes: int
    memory_hits: int
    memory_misses: int
    num_transfers: int
    num_evicted: int
    num_condemned: int
    num_bytes_sent: int
    num_bytes_received: int
    namespaces: tuple[NamespaceStatus, ...]
    sessions: tuple[SessionStatus, ...]


class ListRecords(_Message, frozen=True, kw_only=True):
    """Records from the ``first`` on, namespaces one behind the other, oldest use first."""

    first: int = 0
    count: int = 1000


class RecordLine(msgspec.Struct, frozen=True, kw_only=True):
    """One record."""

    namespace: str
    key: str
    parent: str
    start: int
    end: int
    extent: str
    num_ranks: int
    num_bytes: int
    created_at: float


class RecordLines(_Message, frozen=True, kw_only=True):
    """``total``: how many there are."""

    records: tuple[RecordLine, ...]
    total: int


class Verify(_Message, frozen=True, kw_only=True):
    """Read the shards of records from the ``first`` on and check every digest. ``remove``: bad ones go."""

    first: int = 0
    count: int = 16
    remove: bool = False


class Verified(_Message, frozen=True, kw_only=True):
    """``bad``: key and what is wrong."""

    num_records: int
    num_bytes: int
    total: int
    bad: tuple[tuple[str, str], ...] = ()


class Collect(_Message, frozen=True, kw_only=True):
    """Remove shards that belong to no visible record and are older than the grace."""


class Collected(_Message, frozen=True, kw_only=True):
    """What was removed, and what is left because it is young."""

    num_objects: int
    num_bytes: int
    num_young: int


class Failed(_Message, frozen=True, kw_only=True):
    """It could not be done."""

    detail: str


AdminRequest = Status | ListRecords | Verify | Collect
AdminReply = ManagerStatus | RecordLines | Verified | Collected | Failed

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[AdminRequest] = msgspec.msgpack.Decoder(AdminRequest)
_reply_decoder: msgspec.msgpack.Decoder[AdminReply] = msgspec.msgpack.Decoder(AdminReply)


def decode_admin_request(payload: bytes | memoryview) -> AdminRequest:
    """The question in a frame. Raises msgspec.DecodeError or msgspec.ValidationError; so does the other one."""
    return decode(_request_decoder, payload)


def decode_admin_reply(payload: bytes | memoryview) -> AdminReply:
    """The answer in a frame."""
    return decode(_reply_decoder, payload)


def encode_admin(message: AdminRequest | AdminReply) -> bytes:
    """Payload of an admin frame."""
    return _encoder.encode(message)
