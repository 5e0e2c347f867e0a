"""Frames: a 16-byte header, then a payload. Owns the header and its checks; knows no socket and no meaning.

A header is `magic(4) version(1) type(1) flags(2) length(4) crc32(4)`, little-endian; the CRC covers the twelve bytes
before it. What a frame type means and how large it may be is declared by whoever uses it (`FrameType`), and the
length is compared with that limit before a byte is allocated.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeAlias

from flare_transport.errors import LocalProtocolError, RemoteProtocolError, VersionMismatchError

__all__ = [
    "FRAMING_VERSION",
    "HEADER_BYTES",
    "MAGIC",
    "MAX_LENGTH",
    "Buffer",
    "Frame",
    "FrameDecoder",
    "FrameType",
    "encode_frame",
    "encode_header",
]

MAGIC = b"flre"
FRAMING_VERSION = 1
HEADER_BYTES = 16
MAX_LENGTH = 0xFFFF_FFFF

_CHECKED = struct.Struct("<4sBBHI")
_CRC = struct.Struct("<I")

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FrameType:
    """A kind of frame: `code` (0 to 255; 0 to 31 belong to this package), a `name` for messages, the largest payload.

    Both sides declare the same type; each checks `max_bytes` on its own, the sender before anything is sent.
    """

    code: int
    name: str
    max_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.code <= 0xFF:
            raise LocalProtocolError(f"frame type {self.name}: code {self.code} is not a byte")
        if not 0 <= self.max_bytes <= MAX_LENGTH:
            raise LocalProtocolError(f"frame type {self.name}: a limit of {self.max_bytes} bytes does not fit a header")

    def check_size(self, num_bytes: int) -> None:
        """Raise `LocalProtocolError` if a payload of `num_bytes` may not be sent as this type."""
        if num_bytes > self.max_bytes:
            raise LocalProtocolError(
                f"a {self.name} frame of {num_bytes} bytes is over its limit of {self.max_bytes} bytes"
            )


class Frame(NamedTuple):
    """A received frame. `payload` is read-only and stays valid for as long as it is held."""

    type: FrameType
    payload: memoryview


def encode_header(frame_type: FrameType, num_bytes: int) -> bytes:
    """Return the 16 bytes that announce a payload of `num_bytes`; raises `LocalProtocolError` if it is too large."""
    frame_type.check_size(num_bytes)
    checked = _CHECKED.pack(MAGIC, FRAMING_VERSION, frame_type.code, 0, num_bytes)
    return checked + _CRC.pack(zlib.crc32(checked))


def encode_frame(frame_type: FrameType, payload: Buffer = b"") -> bytes:
    """Return a whole frame as bytes; raises `LocalProtocolError` if the payload is too large."""
    return b"".join((encode_header(frame_type, len(payload)), payload))


class FrameDecoder:
    """Bytes in, in any split; frames out. After a fault it stays failed: a stream that lost its place never recovers.

    `types` maps code to declared type and is read at each header, so a live mapping may grow between frames.
    """

    def __init__(self, types: Mapping[int, FrameType]) -> None:
        self._types = types
        self._partial = bytearray()
        self._type: FrameType | None = None
        self._payload = bytearray()
        self._num_filled = 0
        self._fault: RemoteProtocolError | None = None

    @property
    def num_bytes_wanted(self) -> int:
        """How many bytes end the header or payload begun: reading no more than this takes no byte of what follows."""
        if self._type is None:
            return HEADER_BYTES - len(self._partial)
        return len(self._payload) - self._num_filled

    def receive(self, data: Buffer) -> Iterator[Frame]:
        """Yield each frame that `data` completes, in order; exhaust the iterator before the next call.

        `data` must not change afterwards: small payloads are views of it. Raises `RemoteProtocolError` at the first
        bad header, after the frames before it were yielded, and at every call from then on.
        """
        if self._fault is not None:
            raise self._fault
        view = memoryview(data).toreadonly()
        position, end = 0, len(view)
        while position < end:
            if self._type is None:
                taken = view[position : position + HEADER_BYTES - len(self._partial)]
                position += len(taken)
                header = self._collect_header(taken)
                if header is None:
                    return
                frame_type, length = self._parse(header)
                if end - position >= length:
                    yield Frame(frame_type, view[position : position + length])
                    position += length
                    continue
                self._type, self._payload, self._num_filled = frame_type, bytearray(length), 0
            taken = view[position : position + len(self._payload) - self._num_filled]
            self._payload[self._num_filled : self._num_filled + len(taken)] = taken
            self._num_filled += len(taken)
            position += len(taken)
            if self._num_filled == len(self._payload):
                frame = Frame(self._type, memoryview(self._payload).toreadonly())
                self._type, self._payload = None, bytearray()
                yield frame

    def receive_eof(self) -> None:
        """The stream ended; raises `RemoteProtocolError` if it ended inside a frame."""
        if self._fault is not None:
            raise self._fault
        if self._type is not None:
            progress = f"{self._num_filled} of {len(self._payload)} bytes"
            self._fail(f"the stream ended inside a {self._type.name} frame, after {progress}")
        if self._partial:
            self._fail(f"the stream ended inside a frame header, after {len(self._partial)} of {HEADER_BYTES} bytes")

    def _collect_header(self, taken: memoryview) -> bytes | memoryview | None:
        if len(taken) == HEADER_BYTES:
            return taken
        self._partial += taken
        if len(self._partial) < HEADER_BYTES:
            return None
        header = bytes(self._partial)
        self._partial.clear()
        return header

    def _parse(self, header: bytes | memoryview) -> tuple[FrameType, int]:
        magic, version, code, flags, length = _CHECKED.unpack_from(header)
        (crc,) = _CRC.unpack_from(header, _CHECKED.size)
        if magic != MAGIC:
            self._fail("the other side does not speak flare's frames (wrong magic)")
        if crc != zlib.crc32(header[: _CHECKED.size]):
            self._fail("a frame header is damaged (its CRC does not match)")
        if version != FRAMING_VERSION:
            self._fault = VersionMismatchError(FRAMING_VERSION, version)
            raise self._fault
        if flags != 0:
            self._fail(f"a frame header has unknown flags {flags:#06x}")
        frame_type = self._types.get(code)
        if frame_type is None:
            self._fail(f"frame type {code} is not expected on this link")
        if length > frame_type.max_bytes:
            self._fail(f"a {frame_type.name} frame announces {length} bytes; its limit is {frame_type.max_bytes} bytes")
        return frame_type, length

    def _fail(self, reason: str) -> NoReturn:
        self._fault = RemoteProtocolError(reason)
        raise self._fault
