"""docs/wire-format.md says what the codec does: its tables are parsed and compared with encoded bytes."""

import hashlib
import typing
from pathlib import Path

import msgspec
import pytest

from flare_transport import BulkUnit, FrameType, Security, UnitAnswer, UnitOp, UnitStatus
from flare_transport.frame_types import ALL_FRAME_TYPES, FIRST_CONSUMER_CODE
from flare_transport.framing import encode_header
from flare_transport.handshake_messages import Hello, Refusal, RefusalCode, Welcome, transcript_of
from flare_transport.key_value_table import MAX_ENTRY_BYTES, MAX_TABLE_BYTES, MAX_WAITING, Reply, Request
from flare_transport.service_messages import (
    ServiceHello,
    ServiceRefusal,
    ServiceRefusalCode,
    ServiceWelcome,
    transcript,
)

DOCUMENT = (Path(__file__).parents[3] / "docs" / "wire-format.md").read_text()

HELLO = Hello((1, 2), Security.TLS, 3, 4, bytes(range(32)), b"peer's certificate")
WELCOME = Welcome(2, (1, 5), Security.TLS, b"run id of 16 byt", b"z" * 32, b"m" * 32, b"rank zero's certificate")
SERVICE_HELLO = ServiceHello((1, 2), Security.TLS, bytes(range(32)), b"client's certificate")
SERVICE_WELCOME = ServiceWelcome(
    2, Security.TLS, b"session of 16 by", b"epoch of 16 byte", b"n" * 32, b"m" * 32, b"service's certificate"
)


def tables(heading):
    """Return the tables of one section, each a list of rows of stripped cells without its two header lines."""
    section = DOCUMENT.split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]
    found, rows = [], []
    for line in [*section.splitlines(), ""]:
        if line.startswith("|"):
            cells = line.replace(r"\|", "¦").strip("|").split("|")
            rows.append([cell.strip() for cell in cells])
        elif rows:
            found.append(rows[2:])
            rows = []
    return found


def digest(data):
    return hashlib.sha256(data).digest()


LAYOUTS = {
    "Frame header": (
        encode_header(FrameType(40, "WORD", 1000), 777),
        {"magic": b"flre", "version": 1, "type": 40, "flags": 0, "length": 777, "crc": None},
    ),
    "HELLO": (
        HELLO.encode(),
        {
            "version_min": 1,
            "version_max": 2,
            "security": 1,
            "reserved": 0,
            "rank": 3,
            "world_size": 4,
            "nonce": HELLO.nonce,
            "certificate_length": len(HELLO.certificate),
            "certificate": HELLO.certificate,
        },
    ),
    "WELCOME": (
        WELCOME.encode(),
        {
            "version": 2,
            "version_min": 1,
            "version_max": 5,
            "security": 1,
            "reserved": 0,
            "run_id": WELCOME.run_id,
            "nonce": WELCOME.nonce,
            "mac": WELCOME.mac,
            "certificate_length": len(WELCOME.certificate),
            "certificate": WELCOME.certificate,
        },
    ),
    "REFUSE": (
        Refusal(RefusalCode.RANK, 6, 7).encode(),
        {"code": 4, "reserved": 0, "expected": 6, "received": 7},
    ),
    "SERVICE_HELLO": (
        SERVICE_HELLO.encode(),
        {
            "version_min": 1,
            "version_max": 2,
            "security": 1,
            "reserved": 0,
            "nonce": SERVICE_HELLO.nonce,
            "certificate_length": len(SERVICE_HELLO.certificate),
            "certificate": SERVICE_HELLO.certificate,
        },
    ),
    "SERVICE_WELCOME": (
        SERVICE_WELCOME.encode(),
        {
            "version": 2,
            "security": 1,
            "reserved": 0,
            "session_id": SERVICE_WELCOME.session_id,
            "epoch": SERVICE_WELCOME.epoch,
            "nonce": SERVICE_WELCOME.nonce,
            "mac": SERVICE_WELCOME.mac,
            "certificate_length": len(SERVICE_WELCOME.certificate),
            "certificate": SERVICE_WELCOME.certificate,
        },
    ),
    "SERVICE_REFUSE": (
        ServiceRefusal(ServiceRefusalCode.WRONG_KEY, (4, 5)).encode(),
        {"code": 3, "reserved": 0, "version_min": 4, "version_max": 5, "unused": 0},
    ),
    "Service transcript": (
        transcript(SERVICE_HELLO, SERVICE_WELCOME).removeprefix(b"flare/service/1"),
        {
            "client_version_min": 1,
            "client_version_max": 2,
            "version": 2,
            "client_security": 1,
            "service_security": 1,
            "client_nonce": SERVICE_HELLO.nonce,
            "service_nonce": SERVICE_WELCOME.nonce,
            "session_id": SERVICE_WELCOME.session_id,
            "epoch": SERVICE_WELCOME.epoch,
            "client_certificate": digest(SERVICE_HELLO.certificate),
            "service_certificate": digest(SERVICE_WELCOME.certificate),
        },
    ),
    "Unit": (
        BulkUnit(UnitOp.PUT, b"transfer 16 byte", 4096, 8192, b"m" * 32).encode(),
        {
            "operation": 2,
            "reserved": 0,
            "transfer": b"transfer 16 byte",
            "offset": 4096,
            "length": 8192,
            "mac": b"m" * 32,
        },
    ),
    "Unit answer": (UnitAnswer(UnitStatus.FAILED, 7).encode(), {"status": 3, "reserved": 0, "length": 7}),
    "Transcript": (
        transcript_of(HELLO, WELCOME).removeprefix(b"flare/rendezvous/1"),
        {
            "hello.version_min": 1,
            "hello.version_max": 2,
            "welcome.version": 2,
            "welcome.version_min": 1,
            "welcome.version_max": 5,
            "security": 0x11,
            "hello.rank": 3,
            "hello.world_size": 4,
            "hello.nonce": HELLO.nonce,
            "hello.certificate": digest(HELLO.certificate),
            "welcome.run_id": WELCOME.run_id,
            "welcome.nonce": WELCOME.nonce,
            "welcome.certificate": digest(WELCOME.certificate),
        },
    ),
}


@pytest.mark.parametrize("heading", LAYOUTS)
def test_every_field_stands_where_the_document_says(heading):
    encoded, fields = LAYOUTS[heading]
    rows = tables(heading)[0]
    assert [row[2] for row in rows] == list(fields)
    end = 0
    for offset, num_bytes, name, _ in rows:
        size = fields[num_bytes] if num_bytes in fields else int(num_bytes)
        assert int(offset) == end, name
        end += size
        value = encoded[end - size : end]
        expected = fields[name]
        if isinstance(expected, int):
            assert int.from_bytes(value, "little") == expected, name
        elif expected is not None:
            assert value == expected, name
    assert end == len(encoded)


def test_every_frame_type_is_listed_with_its_code_and_limit():
    listed = [(int(code), name, int(limit)) for code, name, limit, *_ in tables("Frame types")[0]]
    assert listed == [(each.code, each.name, each.max_bytes) for each in ALL_FRAME_TYPES]
    assert f"declare theirs from {FIRST_CONSUMER_CODE} on" in DOCUMENT
    assert all(code < FIRST_CONSUMER_CODE for code, _, _ in listed)


def test_every_refusal_is_listed():
    assert [(int(code), name) for code, name, _ in tables("REFUSE")[1]] == [(code, code.name) for code in RefusalCode]


def test_every_key_value_request_is_listed_with_its_fields():
    listed = {tag: fields.split(", ") for tag, fields, _ in tables("Key-value service")[0]}
    declared = {each.__struct_config__.tag: list(each.__struct_fields__) for each in typing.get_args(Request)}
    assert listed == declared
    assert f"`{', '.join(Reply.__struct_fields__)}`" in DOCUMENT
    for request in typing.get_args(Request):
        sample = msgspec.msgpack.decode(
            msgspec.msgpack.encode([request.__struct_config__.tag, *_samples(request)]), type=Request
        )
        assert isinstance(sample, request)


def _samples(request):
    samples = {"id": 7, "key": "k", "keys": ["k"], "amount": 1}
    return [samples.get(name, b"bytes") for name in request.__struct_fields__]


def test_the_limits_in_the_text_are_the_codes():
    for limit in (MAX_ENTRY_BYTES, MAX_TABLE_BYTES, MAX_WAITING):
        assert f"{limit:,}" in DOCUMENT
