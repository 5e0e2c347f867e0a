"""Decoding what the other side sent: one kind of error for whatever it may be."""

from __future__ import annotations

from typing import TypeVar

import msgspec

__all__ = ["decode"]

T = TypeVar("T")


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """The value in ``data``. Raises msgspec.DecodeError (ValidationError is one), also for too deep nesting."""
    try:
        return decoder.decode(data)
    except RecursionError:
        # Fields are looked through for the one that names the message, whatever else stands in them.
        raise msgspec.DecodeError("the message is nested too deeply") from None
