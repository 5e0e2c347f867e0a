"""Counts inside payloads, one below what is there, at it and one above, and at their limits."""

import struct

import msgspec
import pytest

from flare_transport import RemoteProtocolError, Security, encode_frame
from flare_transport.exchange import _split_whole
from flare_transport.frame_types import HELLO, MAX_CERTIFICATE_BYTES, WELCOME
from flare_transport.handshake_messages import Hello, Welcome, decode_hello, decode_welcome
from flare_transport.key_value_table import (
    MAX_ENTRY_BYTES,
    MAX_WAITING,
    GetRequest,
    KeyValueTable,
    Request,
    SetRequest,
)


def hello(num_bytes: int) -> Hello:
    return Hello((1, 1), Security.TLS, 1, 2, b"n" * 32, bytes(num_bytes))


def welcome(num_bytes: int) -> Welcome:
    return Welcome(1, (1, 1), Security.TLS, b"r" * 16, b"n" * 32, b"m" * 32, bytes(num_bytes))


@pytest.mark.parametrize("message", [(hello, decode_hello, HELLO), (welcome, decode_welcome, WELCOME)])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_certificate_is_read_up_to_its_limit(message, offset):
    make, decode, frame_type = message
    payload = make(MAX_CERTIFICATE_BYTES + offset).encode()
    if offset > 0:
        assert len(payload) > frame_type.max_bytes
        with pytest.raises(RemoteProtocolError):
            decode(payload)
    else:
        assert len(decode(payload).certificate) == MAX_CERTIFICATE_BYTES + offset
        assert encode_frame(frame_type, payload)


@pytest.mark.parametrize("message", [(hello, decode_hello, 46), (welcome, decode_welcome, 88)])
@pytest.mark.parametrize("offset", [-1, 1, 65535 - 100])
def test_a_certificate_of_another_length_than_announced_is_refused(message, offset):
    make, decode, at = message
    payload = bytearray(make(100).encode())
    payload[at : at + 2] = struct.pack("<H", 100 + offset)
    with pytest.raises(RemoteProtocolError, match=f"announces a certificate of {100 + offset} bytes and has 100"):
        decode(payload)


@pytest.mark.parametrize("offset", [-1, 0, 1, 0xFFFF_FFFF - 8])
@pytest.mark.parametrize("part", [0, 1])
def test_parts_of_an_exchange_must_add_up(offset, part):
    lengths = [8, 8]
    lengths[part] += offset
    payload = struct.pack("<Q", 5) + b"".join(struct.pack("<I", length) + b"x" * 8 for length in lengths)
    if offset == 0:
        assert _split_whole(memoryview(payload), 2) == (5, [b"x" * 8, b"x" * 8])
    else:
        with pytest.raises(RemoteProtocolError, match="exchange"):
            _split_whole(memoryview(payload), 2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_exchange_has_one_part_a_rank(world_size):
    payload = struct.pack("<Q", 5) + 2 * (struct.pack("<I", 2) + b"ab")
    with pytest.raises(RemoteProtocolError, match="exchange"):
        _split_whole(memoryview(payload), world_size)


@pytest.mark.parametrize("key", ["k", "\U0001f525" * 9])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_an_entry_of_the_table_is_taken_up_to_its_limit_in_bytes(key, offset):
    table = KeyValueTable()
    value = bytes(MAX_ENTRY_BYTES - len(key.encode()) + offset)
    ((_, reply),) = table.handle(1, SetRequest(1, key, value))
    assert bool(reply.fault) is (offset > 0)


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_table_is_filled_up_to_its_limit_in_bytes(offset):
    table = KeyValueTable(max_bytes=1000)
    table.handle(1, SetRequest(1, "a" * 100, bytes(400)))
    ((_, reply),) = table.handle(1, SetRequest(2, "é" * 50, bytes(400 + offset)))
    assert bool(reply.fault) is (offset > 0)


def test_as_many_requests_wait_as_the_limit_says_and_no_more():
    table = KeyValueTable()
    answers = [table.handle(1, GetRequest(number, "never")) for number in range(MAX_WAITING + 1)]
    assert all(answer == [] for answer in answers[:MAX_WAITING])
    ((_, reply),) = answers[MAX_WAITING]
    assert str(MAX_WAITING) in reply.fault


@pytest.mark.parametrize("change", [-1, 1])
def test_a_request_with_a_field_less_or_more_is_none(change):
    fields = ["set", 1, "key", b"value"]
    fields = fields[:change] if change < 0 else [*fields, "more"]
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Request)


def test_a_request_nested_without_end_is_none():
    deep = b"\x95\xa3set\x01\xa1k\xc4\x01v" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(deep, type=Request)
