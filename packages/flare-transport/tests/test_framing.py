"""The frame codec: any split of bytes, limits before allocation, and whose fault is whose."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_transport import HEADER_BYTES, FrameDecoder, FrameType, LocalProtocolError, RemoteProtocolError, encode_frame
from flare_transport.errors import VersionMismatchError
from flare_transport.framing import encode_header

SMALL = FrameType(40, "SMALL", 10)
LARGE = FrameType(41, "LARGE", 200_000)
EMPTY = FrameType(42, "EMPTY", 0)
TYPES = {each.code: each for each in (SMALL, LARGE, EMPTY)}


def header(*, magic=b"flre", version=1, code=40, flags=0, length=0, crc=None):
    checked = struct.pack("<4sBBHI", magic, version, code, flags, length)
    return checked + struct.pack("<I", zlib.crc32(checked) if crc is None else crc)


def decode_all(pieces):
    decoder = FrameDecoder(TYPES)
    frames = [(frame.type, bytes(frame.payload)) for piece in pieces for frame in decoder.receive(piece)]
    decoder.receive_eof()
    return frames


frames_strategy = st.lists(
    st.one_of(
        st.tuples(st.just(SMALL), st.binary(max_size=10)),
        st.tuples(st.just(LARGE), st.binary(max_size=300)),
        st.tuples(st.just(EMPTY), st.just(b"")),
    ),
    max_size=8,
)


@given(frames_strategy, st.data())
def test_frames_survive_any_split_of_their_bytes(frames, data):
    stream = b"".join(encode_frame(frame_type, payload) for frame_type, payload in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decode_all(pieces) == frames


def test_frames_survive_one_byte_at_a_time():
    stream = encode_frame(LARGE, b"x" * 70_000) + encode_frame(EMPTY) + encode_frame(SMALL, b"tail")
    assert decode_all(bytes([byte]) for byte in stream) == [(LARGE, b"x" * 70_000), (EMPTY, b""), (SMALL, b"tail")]


@given(frames_strategy.filter(bool), st.data())
def test_a_stream_cut_inside_a_frame_is_a_fault_and_whole_frames_before_it_count(frames, data):
    encoded = [encode_frame(frame_type, payload) for frame_type, payload in frames]
    cut = data.draw(st.integers(1, len(encoded[-1]) - 1))
    decoder = FrameDecoder(TYPES)
    received = list(decoder.receive(b"".join(encoded[:-1]) + encoded[-1][:cut]))
    assert [(frame.type, bytes(frame.payload)) for frame in received] == frames[:-1]
    with pytest.raises(RemoteProtocolError, match="ended inside"):
        decoder.receive_eof()


@given(frames_strategy)
def test_reading_what_is_wanted_never_takes_a_byte_of_the_next_frame(frames):
    stream = b"".join(encode_frame(frame_type, payload) for frame_type, payload in frames)
    decoder, position, received = FrameDecoder(TYPES), 0, []
    while position < len(stream):
        wanted = decoder.num_bytes_wanted
        assert wanted > 0
        for frame in decoder.receive(stream[position : position + wanted]):
            received.append(frame)
            assert stream[: position + wanted].endswith(bytes(frame.payload))
        position += wanted
    assert position == len(stream)
    assert [(frame.type, bytes(frame.payload)) for frame in received] == frames


@given(st.binary(min_size=16, max_size=200))
def test_garbage_is_refused_or_waits_for_more_and_never_yields_a_frame(garbage):
    decoder = FrameDecoder(TYPES)
    if garbage[:4] != b"flre":
        with pytest.raises(RemoteProtocolError, match="magic"):
            list(decoder.receive(garbage))


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_header_is_seen(bit):
    stream = bytearray(encode_frame(SMALL, b"abc"))
    stream[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        list(FrameDecoder(TYPES).receive(bytes(stream)))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (header(magic=b"HTTP"), "magic"),
        (header(crc=1), "CRC"),
        (header(flags=2), "flags"),
        (header(code=99), "frame type 99 is not expected"),
        (header(length=11), "SMALL frame announces 11 bytes; its limit is 10"),
        (header(code=41, length=0xFFFFFFFF), "4294967295"),
        (header(code=42, length=1), "EMPTY"),
    ],
)
def test_a_bad_header_is_a_fault_of_the_other_side_from_then_on(bad, says):
    decoder = FrameDecoder(TYPES)
    with pytest.raises(RemoteProtocolError, match=says):
        list(decoder.receive(bad))
    with pytest.raises(RemoteProtocolError, match=says):
        list(decoder.receive(encode_frame(SMALL, b"fine")))
    with pytest.raises(RemoteProtocolError, match=says):
        decoder.receive_eof()


def test_another_framing_version_is_reported_with_both_versions():
    with pytest.raises(VersionMismatchError, match=r"version 2.*version 1") as caught:
        list(FrameDecoder(TYPES).receive(header(version=2)))
    assert (caught.value.expected, caught.value.received) == (1, 2)


@pytest.mark.parametrize("num_bytes", [0, 9, 10])
def test_a_payload_up_to_its_limit_travels(num_bytes):
    assert decode_all([encode_frame(SMALL, bytes(num_bytes))]) == [(SMALL, bytes(num_bytes))]


def test_a_payload_over_its_limit_is_refused_before_anything_is_encoded():
    with pytest.raises(LocalProtocolError, match="SMALL frame of 11 bytes is over its limit of 10 bytes"):
        encode_header(SMALL, 11)
    with pytest.raises(LocalProtocolError):
        SMALL.check_size(11)
    SMALL.check_size(10)


@pytest.mark.parametrize(("code", "max_bytes"), [(-1, 1), (256, 1), (1, -1), (1, 1 << 32)])
def test_a_frame_type_that_no_header_can_hold_is_refused(code, max_bytes):
    with pytest.raises(LocalProtocolError):
        FrameType(code, "WRONG", max_bytes)


def test_types_declared_later_are_understood_from_then_on():
    types = {}
    decoder = FrameDecoder(types)
    types[SMALL.code] = SMALL
    assert [frame.type for frame in decoder.receive(encode_frame(SMALL))] == [SMALL]


def test_a_received_payload_is_read_only():
    (frame,) = FrameDecoder(TYPES).receive(bytearray(encode_frame(SMALL, b"abc")))
    assert frame.payload.readonly
