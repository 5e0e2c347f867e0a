"""The handshake's messages: what is encoded is decoded, and what is malformed is refused."""

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_transport import FrameDecoder, RemoteProtocolError, Security, encode_frame
from flare_transport.frame_types import ALL_FRAME_TYPES, HELLO, WELCOME, by_code
from flare_transport.handshake_messages import (
    Hello,
    Refusal,
    RefusalCode,
    Welcome,
    decode_hello,
    decode_refusal,
    decode_welcome,
    transcript_mac,
)


def only_payload(stream):
    (frame,) = FrameDecoder(by_code(*ALL_FRAME_TYPES)).receive(stream)
    return bytes(frame.payload)


hellos = st.builds(
    Hello,
    st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)),
    st.sampled_from(Security),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFFFFFFFF),
    st.binary(min_size=32, max_size=32),
    st.binary(max_size=4096),
)
welcomes = st.builds(
    Welcome,
    st.integers(0, 0xFFFF),
    st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)),
    st.sampled_from(Security),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.binary(max_size=4096),
)


@given(hellos, welcomes)
def test_messages_decode_to_what_was_encoded(hello, welcome):
    assert decode_hello(only_payload(encode_frame(HELLO, hello.encode()))) == hello
    assert decode_welcome(only_payload(encode_frame(WELCOME, welcome.encode()))) == welcome


@given(st.sampled_from(RefusalCode), st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFFFFFFFF))
def test_every_refusal_decodes_and_says_something(code, expected, received):
    refusal = Refusal(code, expected, received)
    assert decode_refusal(refusal.encode()) == refusal
    assert refusal.describe()


def test_a_refusal_when_rank_zero_gave_up_counts_the_ranks():
    assert "2 of 3 ranks had come" in Refusal(RefusalCode.INCOMPLETE, 3, 2).describe()


@pytest.mark.parametrize(
    ("decode", "payload", "says"),
    [
        (decode_hello, b"short", "expected at least 48"),
        (decode_welcome, b"short", "expected at least 90"),
        (decode_hello, Hello((1, 1), Security.TLS, 1, 3, b"n" * 32, b"cert").encode()[:-1], "4 bytes and has 3"),
        (decode_hello, Hello((1, 1), 7, 1, 3, b"n" * 32, b"").encode(), "unknown link security 7"),
        (decode_refusal, b"\1", "expected 12"),
        (decode_refusal, bytes([99]) + bytes(11), "unknown reason 99"),
    ],
)
def test_a_malformed_message_is_a_fault_of_the_other_side(decode, payload, says):
    with pytest.raises(RemoteProtocolError, match=says):
        decode(payload)


def test_the_mac_is_hmac_sha256_over_role_and_transcript():
    assert transcript_mac(b"k", b"srv", b"t") == hmac.new(b"k", b"srv\0t", "sha256").digest()
