"""Every frame type of flare, one byte below its limit, at it and one above: nothing is made room for beyond it."""

import struct
import tracemalloc
import zlib

import pytest

from flare_cache import record_link
from flare_cli import control_group, worker_protocol
from flare_transport import FrameDecoder, FrameType, LocalProtocolError, RemoteProtocolError, encode_frame
from flare_transport.frame_types import ALL_FRAME_TYPES
from flare_transport.framing import FRAMING_VERSION, HEADER_BYTES, MAGIC, encode_header

MODULES = (record_link, control_group, worker_protocol)
TYPES = {each.name: each for each in ALL_FRAME_TYPES} | {
    value.name: value for module in MODULES for value in vars(module).values() if isinstance(value, FrameType)
}
ROOM = 256 << 10
"""More than a decoder needs for itself, less than any payload that would have to be refused for its size alone."""


def announced(frame_type: FrameType, num_bytes: int) -> bytes:
    checked = struct.pack("<4sBBHI", MAGIC, FRAMING_VERSION, frame_type.code, 0, num_bytes)
    return checked + struct.pack("<I", zlib.crc32(checked))


@pytest.mark.parametrize("name", TYPES)
def test_a_length_up_to_the_limit_is_awaited_and_one_above_is_refused_before_room_is_made(name):
    frame_type = TYPES[name]
    for num_bytes in (frame_type.max_bytes - 1, frame_type.max_bytes):
        decoder = FrameDecoder({frame_type.code: frame_type})
        frames = list(decoder.receive(announced(frame_type, max(0, num_bytes))))
        assert len(frames) == (num_bytes <= 0)
        assert decoder.num_bytes_wanted == (num_bytes if num_bytes > 0 else HEADER_BYTES)
    for num_bytes in (frame_type.max_bytes + 1, 2 * frame_type.max_bytes + 1, 0xFFFF_FFFF):
        decoder = FrameDecoder({frame_type.code: frame_type})
        header = announced(frame_type, num_bytes)
        tracemalloc.start()
        try:
            with pytest.raises(RemoteProtocolError, match=f"announces {num_bytes} bytes; its limit is"):
                list(decoder.receive(header))
            assert tracemalloc.get_traced_memory()[1] < ROOM
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("name", TYPES)
def test_a_payload_over_its_limit_is_not_sent(name):
    frame_type = TYPES[name]
    assert len(encode_header(frame_type, frame_type.max_bytes)) == HEADER_BYTES
    with pytest.raises(LocalProtocolError, match="over its limit"):
        encode_header(frame_type, frame_type.max_bytes + 1)


@pytest.mark.parametrize("name", [name for name, each in TYPES.items() if 0 < each.max_bytes <= 4 << 20])
def test_a_payload_at_its_limit_arrives_whole(name):
    frame_type = TYPES[name]
    (frame,) = FrameDecoder({frame_type.code: frame_type}).receive(
        encode_frame(frame_type, bytes(frame_type.max_bytes))
    )
    assert len(frame.payload) == frame_type.max_bytes


def test_what_a_stranger_may_send_before_it_has_proven_anything_is_small():
    before_the_proof = ("HELLO", "WELCOME", "PROOF", "ACCEPT", "REFUSE", "LINK_PROOF", "LINK_ACCEPT")
    assert max(TYPES[name].max_bytes for name in before_the_proof) < 5000
