"""Headers judged many at once: exactly those that the decoder accepts one by one, with the same records."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.header_columns import sound_headers
from flare_cache.jobs import RecordIdentity
from flare_cache.record import (
    BLOCK_BYTES,
    SHA256_BYTES,
    RecordError,
    check_header,
    decode_header,
    encode_header,
    file_layout,
    header_length,
)
from flare_cache.record_table import RecordTable, ScannedRecord
from flare_core.geometry import Axis, Geometry, Plane

SET = hashlib.sha256(b"a set").digest()
PAGE = 8


def geometry_of(rank: int, row_bytes: int) -> Geometry:
    return Geometry(rank, 2, PAGE, (Plane("kv", "float32", (Axis("token", PAGE), Axis("dim", 8))),), row_bytes)


OWN = geometry_of(1, 5000)


@st.composite
def identities(draw) -> RecordIdentity:
    start = PAGE * draw(st.integers(0, 3))
    tail = draw(st.integers(0, PAGE - 1))
    num_pages = draw(st.integers(0 if tail else 1, 60))
    return RecordIdentity(
        key=draw(st.binary(min_size=32, max_size=32)),
        store_id=draw(st.binary(min_size=16, max_size=16)),
        parent_key=draw(st.sampled_from([b"", b"\0" * 32, b"p" * 32])),
        start_key=bytes(32),
        start=start,
        end=start + num_pages * PAGE + tail,
        page_tokens=PAGE,
        tail_tokens=tail,
        has_row=draw(st.booleans()),
    )


@st.composite
def files(draw) -> tuple[bytes, bytes, int]:
    """The key that a file's name says, its header, perhaps changed, and its size."""
    identity = draw(identities())
    geometry = draw(st.sampled_from([OWN, OWN, OWN, geometry_of(0, 5000), geometry_of(1, 9000)]))
    layout = file_layout(identity, page_bytes=geometry.page_bytes, row_stride=geometry.row_stride)
    header = bytearray(
        encode_header(
            identity,
            draw(st.binary(min_size=4, max_size=4)) * (identity.end - identity.start),
            set_fingerprint=draw(st.sampled_from([SET, SET, SET, bytes(32)])),
            geometry=geometry,
            digests=bytes(16 * layout.num_digests),
        )
    )
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        at = draw(st.integers(0, min(len(header), 600) - 1))
        header[at] = draw(st.integers(0, 255))
        if draw(st.booleans()):  # a header that lies, and whose checksum does not
            header[-SHA256_BYTES:] = hashlib.sha256(header[:-SHA256_BYTES]).digest()
    name = draw(st.sampled_from([identity.key, identity.key, identity.key, bytes(32)]))
    size = draw(st.sampled_from([0, layout.pages_end - 1, layout.pages_end, layout.tail_end, layout.row_end]))
    return name, bytes(header), size + draw(st.sampled_from([0, 0, 7]))


def one_by_one(name: bytes, header: bytes, size: int) -> ScannedRecord | None:
    try:
        found = decode_header(header)
        check_header(found, set_fingerprint=SET, geometry=OWN)
    except RecordError:
        return None
    legal = found.layout.legal_size(size)
    if found.identity.key != name or legal is None or found.layout.header_bytes != BLOCK_BYTES:
        return None
    return ScannedRecord(
        identity=found.identity,
        invariant_digest=found.invariant_digest,
        size=legal,
        has_tail=found.layout.has_tail and legal >= found.layout.tail_end,
        has_row=found.layout.has_row and legal >= found.layout.row_end,
        token_ids=found.token_ids,
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(files(), max_size=6))
def test_what_is_judged_at_once_is_what_the_decoder_accepts_one_by_one(found) -> None:
    blocks = b"".join(header[:BLOCK_BYTES] for _, header, _ in found)
    places, table = sound_headers(
        np.frombuffer(blocks, dtype=np.uint8).reshape(-1, BLOCK_BYTES),
        keys=b"".join(name for name, _, _ in found),
        file_sizes=np.array([size for _, _, size in found], dtype=np.int64),
        geometry=OWN,
        set_fingerprint=SET,
        with_token_ids=True,
    )
    expected = {at: record for at, file in enumerate(found) if (record := one_by_one(*file)) is not None}
    assert dict(zip(places.tolist(), table, strict=True)) == expected


@given(st.lists(identities(), max_size=5), st.data())
def test_a_table_is_its_records(found, data) -> None:
    records = [
        ScannedRecord(
            identity=identity,
            invariant_digest=identity.key[::-1],
            size=at,
            has_tail=data.draw(st.booleans()),
            has_row=data.draw(st.booleans()),
            token_ids=b"1234" * at,
        )
        for at, identity in enumerate(found)
    ]
    table = RecordTable.of(records)
    assert list(table) == records
    assert list(table.each_identity()) == found
    assert list(RecordTable.joined([table[1:], table[:1]])) == records[1:] + records[:1]


def test_a_header_longer_than_a_block_is_left_to_the_decoder() -> None:
    identity = RecordIdentity(
        key=bytes(32), store_id=bytes(16), parent_key=b"", start_key=bytes(32), start=0, end=PAGE * 200,
        page_tokens=PAGE, tail_tokens=0, has_row=False,
    )  # fmt: skip
    header = encode_header(
        identity, bytes(4 * identity.end), set_fingerprint=SET, geometry=OWN, digests=bytes(16 * 200)
    )
    assert header_length(header) == 3 * BLOCK_BYTES
    assert msgspec.structs.asdict(decode_header(header).identity) == msgspec.structs.asdict(identity)
    places, _ = sound_headers(
        np.frombuffer(header[:BLOCK_BYTES], dtype=np.uint8).reshape(1, -1),
        keys=identity.key,
        file_sizes=np.array([1 << 30], dtype=np.int64),
        geometry=OWN,
        set_fingerprint=SET,
        with_token_ids=False,
    )
    assert places.tolist() == []
