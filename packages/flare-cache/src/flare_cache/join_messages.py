"""What ranks say to each other at join, and its encoding. One frame type carries a tagged union of small messages."""

from __future__ import annotations

import msgspec

from flare_cache.join_report import JoinReport
from flare_cache.join_set import Summary
from flare_cache.settings import Statement

__all__ = [
    "CHUNK_RECORDS",
    "Applied",
    "Apply",
    "Broken",
    "Confirmed",
    "Hello",
    "JoinMessage",
    "Joined",
    "Proposal",
    "Refused",
    "ScanChunk",
    "VerdictChunk",
    "decode_message",
    "encode_message",
]

CHUNK_RECORDS = 8192
"""Records that one frame lists: some 600 KiB."""


class Hello(msgspec.Struct, frozen=True, tag=1, array_like=True, forbid_unknown_fields=True):
    """Peer: who I am; ``statement.num_records`` records follow in chunks."""

    statement: Statement


class ScanChunk(msgspec.Struct, frozen=True, tag=2, array_like=True, forbid_unknown_fields=True):
    """Peer: the next records of my scan."""

    part: Summary


class Refused(msgspec.Struct, frozen=True, tag=3, array_like=True, forbid_unknown_fields=True):
    """Rank zero: start-up has failed on every rank. ``is_mismatch``: by settings that must be equal."""

    lines: list[str]
    is_mismatch: bool


class Broken(msgspec.Struct, frozen=True, tag=4, array_like=True, forbid_unknown_fields=True):
    """Peer: I cannot go on."""

    reason: str


class VerdictChunk(msgspec.Struct, frozen=True, tag=5, array_like=True, forbid_unknown_fields=True):
    """Rank zero: verdict bytes for the next records of your scan."""

    verdicts: bytes


class Proposal(msgspec.Struct, frozen=True, tag=6, array_like=True, forbid_unknown_fields=True):
    """Rank zero: all verdicts were sent; this is the set they mean. ``digest`` as by ``join_set.kept_digest``."""

    set_id: bytes
    digest: bytes


class Confirmed(msgspec.Struct, frozen=True, tag=7, array_like=True, forbid_unknown_fields=True):
    """Peer: the verdicts mean this set, and I hold all of it."""

    digest: bytes


class Apply(msgspec.Struct, frozen=True, tag=8, array_like=True, forbid_unknown_fields=True):
    """Rank zero: every rank has confirmed; remove the rest."""


class Applied(msgspec.Struct, frozen=True, tag=9, array_like=True, forbid_unknown_fields=True):
    """Peer: done; what was removed and what was left alone."""

    num_truncated: int
    num_damaged: int
    num_left: int


class Joined(msgspec.Struct, frozen=True, tag=10, array_like=True, forbid_unknown_fields=True):
    """Rank zero: every rank has applied."""

    report: JoinReport


JoinMessage = Hello | ScanChunk | Refused | Broken | VerdictChunk | Proposal | Confirmed | Apply | Applied | Joined

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[JoinMessage] = msgspec.msgpack.Decoder(JoinMessage)


def encode_message(message: JoinMessage) -> bytes:
    """Payload of a RECORD_JOIN frame."""
    return _encoder.encode(message)


def decode_message(payload: bytes | memoryview) -> JoinMessage:
    """The message in ``payload``.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is none.
    """
    return _decoder.decode(payload)
