"""The frame decoder: what any stranger's bytes reach first."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator

from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require
from flare_transport import FrameDecoder, FrameType, RemoteProtocolError, encode_frame
from flare_transport.framing import FRAMING_VERSION, HEADER_BYTES, MAGIC

__all__ = ["FRAMES"]

_TYPES = {
    each.code: each for each in (FrameType(1, "EMPTY", 0), FrameType(2, "SMALL", 40), FrameType(3, "LARGE", 3000))
}
_LARGEST = max(frame_type.max_bytes for frame_type in _TYPES.values())
_HEADER = struct.Struct("<4sBBHI")

_Decoded = tuple[list[tuple[int, bytes]], str]


def _stream(choices: Choices) -> bytes:
    """Raw bytes, or headers that are right but for what the input changes in them, CRC included."""
    if choices.flag():
        return choices.rest()
    parts: list[bytes] = []
    while not choices.is_spent:
        code = choices.pick((1, 2, 3, 3, 0, 200))
        payload = choices.piece(60)
        length = choices.pick((len(payload), len(payload), len(payload) + 1, 40, 41, 3000, 3001, 0xFFFF_FFFF))
        version, flags = choices.pick(((FRAMING_VERSION, 0),) * 14 + ((2, 0), (FRAMING_VERSION, 1)))
        checked = _HEADER.pack(MAGIC, version, code, flags, length)
        crc = zlib.crc32(checked) ^ (choices.integer(0, 31) == 31)
        parts.append(checked + struct.pack("<I", crc) + payload)
    return b"".join(parts)


def _decode(pieces: list[bytes]) -> _Decoded:
    decoder = FrameDecoder(_TYPES)
    frames: list[tuple[int, bytes]] = []
    try:
        for piece in pieces:
            for frame in decoder.receive(piece):
                frames.append((frame.type.code, bytes(frame.payload)))
                require(len(frame.payload) <= frame.type.max_bytes, "a payload over its type's limit was delivered")
            require(
                0 < decoder.num_bytes_wanted <= max(HEADER_BYTES, _LARGEST), "more is awaited than any type may hold"
            )
        decoder.receive_eof()
    except RemoteProtocolError as error:
        _check_stays_failed(decoder, str(error))
        return frames, str(error)
    return frames, ""


def _check_stays_failed(decoder: FrameDecoder, fault: str) -> None:
    for again in (lambda: list(decoder.receive(b"x")), decoder.receive_eof):
        try:
            again()
        except RemoteProtocolError as error:
            require(str(error) == fault, f"a decoder that failed by '{fault}' now fails by '{error}'")
        else:
            require(False, f"a decoder that failed by '{fault}' went on")


def _execute(data: bytes) -> None:
    choices = Choices(data)
    step = choices.integer(1, 40)
    stream = _stream(choices)
    whole = _decode([stream])
    for size in {1, step}:
        cut = _decode([stream[at : at + size] for at in range(0, len(stream), size)])
        require(cut == whole, f"in pieces of {size} bytes: {cut}, in one: {whole}")
    frames, _ = whole
    encoded = b"".join(encode_frame(_TYPES[code], payload) for code, payload in frames)
    require(stream.startswith(encoded), "what was decoded is not what was sent")


@contextlib.contextmanager
def _open() -> Iterator[Execute]:
    yield _execute


def _seeds() -> Iterator[bytes]:
    frames = [encode_frame(_TYPES[2], b"small"), encode_frame(_TYPES[1]), encode_frame(_TYPES[3], b"x" * 200)]
    for step in (0, 6, 15):
        yield bytes((step, 1)) + b"".join(frames)
        yield bytes((step, 0)) + bytes(range(80))
    yield b"\x00\x01" + frames[2][:-1]
    yield b"\x03\x01GET / HTTP/1.1\r\n\r\n"


FRAMES = Target(
    "frames",
    "A stream decodes alike in any pieces, only to what was sent, fails by RemoteProtocolError alone and stays failed.",
    _open,
    _seeds,
    words=(MAGIC, _HEADER.pack(MAGIC, FRAMING_VERSION, 2, 0, 5), b"\xff\xff\xff\xff"),
)
