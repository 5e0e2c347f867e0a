"""All MessagePack messages between processes, through the product's own decoders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require
from flare_qualify.fuzz.targets.samples import WIRES
from flare_qualify.fuzz.tree import changed

__all__ = ["MESSAGES", "odd_message"]

_DEEP = b"\x91" * 3000 + b"\xc0"


def odd_message(sample: Any, choices: Choices) -> bytes:
    """The bytes of ``sample``, changed in a few places, or bytes that follow nothing."""
    way = choices.integer(0, 15)
    encoded = msgspec.msgpack.encode(sample)
    if way == 15:
        return choices.rest()
    if way == 14:
        return encoded[: choices.integer(0, len(encoded))] + choices.pick((b"", b"\xdd\xff\xff\xff\xff", _DEEP))
    tree = msgspec.msgpack.decode(encoded)
    for _ in range(choices.integer(1, 3)):
        tree = changed(tree, choices)
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, RecursionError):  # what cannot be encoded cannot arrive
        return encoded


def _execute(data: bytes) -> None:
    choices = Choices(data)
    wire = choices.pick(WIRES)
    message = odd_message(choices.pick(wire.samples), choices)
    try:
        value = wire.decode(message)
    except msgspec.DecodeError:
        return
    again = wire.decode(msgspec.msgpack.encode(value))
    require(again == value or _has_nan(value), f"{wire.name}: {value} is not what its own encoding decodes to")


def _has_nan(value: Any) -> bool:
    return "nan" in repr(value)


@contextlib.contextmanager
def _open() -> Iterator[Execute]:
    yield _execute


def _seeds() -> Iterator[bytes]:
    for number, wire in enumerate(WIRES):
        for sample in range(len(wire.samples)):
            yield bytes((number, sample, 15)) + msgspec.msgpack.encode(wire.samples[sample])
        for way in range(8):
            yield bytes((number, 0, 0, 1, 3 + way, 0, way, 9, 9, 9))
        yield bytes((number, 0, 14, 200, 0, 2))


MESSAGES = Target(
    "messages",
    "Whatever bytes come, a decoder gives a value that encodes back to itself, or raises msgspec.DecodeError.",
    _open,
    _seeds,
    words=(b"\x91" * 16, b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xa2\xc3\x28"),
)
