"""What ranks say to each other about the pool, over their record links, and its codec. Knows no socket and no state.

Rank zero proposes a session, every rank votes, and rank zero says whether the pool is on for all or off for all.
"""

from __future__ import annotations

import msgspec

from flare_cache.record_link import MAX_REASON_CHARACTERS

__all__ = [
    "Lost",
    "PoolMessage",
    "Propose",
    "TurnOff",
    "TurnOn",
    "Vote",
    "decode_pool_message",
    "encode_pool_message",
]


class Propose(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Rank zero: connect to the pool's manager, register, and vote.

    Attributes:
        session: drawn by rank zero for each attempt, 16 bytes.
        address: index among the addresses of ``--pool``.
        epoch: of the manager's process, as rank zero met it; empty to rank zero itself, which comes first.
        settings: digest of what must be equal on every rank.
    """

    session: bytes
    address: int
    epoch: bytes
    settings: bytes


class Vote(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """A rank: registered with the manager of ``epoch``, or, with a ``reason``, not."""

    session: bytes
    rank: int
    epoch: bytes
    reason: str


class TurnOn(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Rank zero: every rank has voted yes."""

    session: bytes


class TurnOff(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Rank zero: the session is over, or never came to be, on every rank."""

    session: bytes
    reason: str


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """A rank has lost the manager, and has turned the session off."""

    session: bytes
    rank: int
    reason: str


PoolMessage = Propose | Vote | TurnOn | TurnOff | Lost

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PoolMessage] = msgspec.msgpack.Decoder(PoolMessage)


def encode_pool_message(message: PoolMessage) -> bytes:
    """Payload of a RECORD_POOL frame; a reason is cut to what a frame may hold."""
    if isinstance(message, Vote | TurnOff | Lost) and len(message.reason) > MAX_REASON_CHARACTERS:
        message = msgspec.structs.replace(message, reason=message.reason[:MAX_REASON_CHARACTERS])
    return _encoder.encode(message)


def decode_pool_message(payload: bytes | memoryview) -> PoolMessage:
    """The message in ``payload``. Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _decoder.decode(payload)
