"""What a rank and the pool's manager say to each other on a control link, and its codec.

Every request has a number that its answer repeats; answers may come in any order. A rank registers first. Transfer
keys never travel: both sides derive them from the session key and the transfer's id. Nothing here does I/O.
"""

from __future__ import annotations

import enum

import msgspec

from flare_cache.jobs import RecordIdentity
from flare_cache.pool.decoding import decode
from flare_cache.pool.manifest import Extent, Manifest
from flare_transport.framing import FrameType

__all__ = [
    "MAX_WORLD_SIZE",
    "POOL_PROTOCOL",
    "POOL_REPLY",
    "POOL_REQUEST",
    "Commit",
    "Committed",
    "Done",
    "Find",
    "Found",
    "GetStart",
    "Grant",
    "Has",
    "Presence",
    "PutFinish",
    "PutStart",
    "Refused",
    "RefusedReason",
    "Register",
    "Registered",
    "Release",
    "Reply",
    "ReportBad",
    "Request",
    "decode_reply",
    "decode_request",
    "encode_reply",
    "encode_request",
]

POOL_PROTOCOL = 1
"""What these messages are; a manager refuses a rank with another number."""

MAX_WORLD_SIZE = 1024
"""Ranks of an instance, at most: the manager counts to it for each record."""

POOL_REQUEST = FrameType(60, "POOL_REQUEST", 4 << 20)
POOL_REPLY = FrameType(61, "POOL_REPLY", 16 << 20)


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="t"):
    pass


class Register(_Message, frozen=True, kw_only=True):
    """The first request on a link. ``session`` is what rank zero proposed; ``buffers`` are sizes of staging areas.

    ``rank`` is below ``world_size``, which is at most :data:`MAX_WORLD_SIZE`.
    """

    protocol: int
    namespace: bytes
    set_fingerprint: bytes
    world_size: int
    rank: int
    session: bytes
    instance: str
    model: str
    buffers: tuple[int, ...]


class Registered(_Message, frozen=True, kw_only=True):
    """``epoch``: of this manager process. ``num_records``: visible in the namespace now; ``num_other_records``: in
    all others."""

    epoch: bytes
    manager: str
    num_records: int
    num_other_records: int


class RefusedReason(enum.StrEnum):
    """Why a request was not done. None of them is a fault of the link."""

    VERSION = "version"
    NOT_REGISTERED = "not-registered"
    RANK = "rank"
    MISSING = "missing"
    EXISTS = "exists"
    QUOTA = "quota"
    FULL = "full"
    INCOMPLETE = "incomplete"
    CORRUPT = "corrupt"
    EXPIRED = "expired"
    STORAGE = "storage"
    BUSY = "busy"
    MALFORMED = "malformed"
    DRAINING = "draining"


class Refused(_Message, frozen=True, kw_only=True):
    """``detail`` is one line for people."""

    reason: RefusedReason
    detail: str = ""


class Find(_Message, frozen=True, kw_only=True):
    """The longest committed run along a chain of keys.

    Attributes:
        root: root key of the chain.
        keys: chain keys of whole pages from the prompt's start, 32 bytes each, one behind the other.
        first_page: pages in front of it need no answer.
        next_ids: up to a page of token ids behind the last of ``keys``, u32 little endian.
    """

    root: bytes
    keys: bytes
    first_page: int
    next_ids: bytes


class Found(_Message, frozen=True, kw_only=True):
    """Manifests of the records that hold the run, parents first, and of a record that goes on with a part of a page.

    Those whose tokens follow from the chain of the request carry no token ids. ``more``: ask again from ``next_page``.
    """

    manifests: tuple[Manifest, ...]
    num_pages: int
    more: bool = False


class Has(_Message, frozen=True, kw_only=True):
    """Which of these keys (32 bytes each) are committed."""

    keys: bytes


class Presence(_Message, frozen=True, kw_only=True):
    """One byte per key: 1 committed, else 0."""

    present: bytes


class GetStart(_Message, frozen=True, kw_only=True):
    """A rank wants to read its shard of a record."""

    key: bytes
    store_id: bytes
    rank: int


class PutStart(_Message, frozen=True, kw_only=True):
    """A rank wants to write its shard. Refused with EXISTS where the key is committed already."""

    record: RecordIdentity
    extent: Extent
    rank: int
    num_bytes: int


class Grant(_Message, frozen=True, kw_only=True):
    """A transfer may begin: its units prove knowledge of its key. ``seconds``: how long it is good for."""

    transfer: bytes
    epoch: bytes
    num_bytes: int
    header_digest: bytes
    seconds: float


class PutFinish(_Message, frozen=True, kw_only=True):
    """Every unit was sent: verify the shard and make it durable. Answered by Done or Refused when that has happened."""

    transfer: bytes


class Release(_Message, frozen=True, kw_only=True):
    """A transfer is over, or given up. Answered by Done."""

    transfer: bytes


class Done(_Message, frozen=True, kw_only=True):
    """It was done. ``num_bytes`` of what was moved or removed."""

    num_bytes: int = 0


class Commit(_Message, frozen=True, kw_only=True):
    """Rank zero: every rank's shard is in: make the record visible."""

    record: RecordIdentity
    extent: Extent
    token_ids: bytes


class Committed(_Message, frozen=True, kw_only=True):
    """Visible. ``store_id``: of the record that is: another instance may have been first."""

    store_id: bytes


class ReportBad(_Message, frozen=True, kw_only=True):
    """A shard failed its digests on a rank: the manager looks for itself, and removes the record if it is so."""

    key: bytes
    store_id: bytes
    rank: int
    detail: str


Request = Register | Find | Has | GetStart | PutStart | PutFinish | Release | Commit | ReportBad
Reply = Registered | Refused | Found | Presence | Grant | Done | Committed


class _Numbered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: int
    request: Request


class _Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: int
    reply: Reply


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(_Numbered)
_reply_decoder = msgspec.msgpack.Decoder(_Answer)


def encode_request(number: int, request: Request) -> bytes:
    """Payload of a POOL_REQUEST frame."""
    return _encoder.encode(_Numbered(number, request))


def decode_request(payload: bytes | memoryview) -> tuple[int, Request]:
    """Number and request. Raises msgspec.DecodeError or msgspec.ValidationError; so does :func:`decode_reply`."""
    frame = decode(_request_decoder, payload)
    return frame.number, frame.request


def encode_reply(number: int, reply: Reply) -> bytes:
    """Payload of a POOL_REPLY frame."""
    return _encoder.encode(_Answer(number, reply))


def decode_reply(payload: bytes | memoryview) -> tuple[int, Reply]:
    """Number and reply."""
    frame = decode(_reply_decoder, payload)
    return frame.number, frame.reply
