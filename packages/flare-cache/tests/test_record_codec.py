"""The record codec: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

import hashlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_cache.digest import DIGEST_BYTES, ROW_INDEX, section_digest
from flare_cache.jobs import RecordIdentity
from flare_cache.record import (
    BLOCK_BYTES,
    MAX_HEADER_BYTES,
    Problem,
    RecordError,
    check_header,
    claimed_set,
    decode_header,
    encode_header,
    file_layout,
    header_length,
    identity_problem,
    rank_invariant_digest,
)
from flare_core.geometry import Axis, Geometry, Plane

SET = bytes(range(32))


def geometry(
    rank: int = 0, world_size: int = 2, *, page_tokens: int = 4, dim: int = 8, row_bytes: int = 100
) -> Geometry:
    axes = (Axis("token", page_tokens), Axis("dim", dim))
    return Geometry(rank, world_size, page_tokens, (Plane("kv", "float32", axes),), row_bytes)


@st.composite
def records(draw) -> tuple[RecordIdentity, bytes, bytes, Geometry]:
    page_tokens = draw(st.integers(1, 9))
    num_pages = draw(st.integers(0, 40))
    tail_tokens = draw(st.integers(0, page_tokens - 1))
    if not num_pages and not tail_tokens:
        num_pages = 1
    start = page_tokens * draw(st.integers(0, 1000))
    key = st.binary(min_size=32, max_size=32)
    identity = RecordIdentity(
        key=draw(key),
        store_id=draw(st.binary(min_size=16, max_size=16)),
        parent_key=draw(key | st.just(b"")),
        start_key=draw(key),
        start=start,
        end=start + num_pages * page_tokens + tail_tokens,
        page_tokens=page_tokens,
        tail_tokens=tail_tokens,
        has_row=draw(st.booleans()),
    )
    num_digests = identity.num_sections + identity.has_row
    token_ids = draw(st.binary(min_size=4 * (identity.end - start), max_size=4 * (identity.end - start)))
    digests = draw(st.binary(min_size=16 * num_digests, max_size=16 * num_digests))
    world_size = draw(st.integers(1, 5))
    shape = geometry(draw(st.integers(0, world_size - 1)), world_size, page_tokens=page_tokens)
    return identity, token_ids, digests, shape


def one_record() -> tuple[RecordIdentity, bytes]:
    identity = RecordIdentity(
        key=bytes([1] * 32), store_id=bytes([2] * 16), parent_key=bytes([3] * 32), start_key=bytes([4] * 32), start=8,
        end=18, page_tokens=4, tail_tokens=2, has_row=True,
    )  # fmt: skip
    header = encode_header(
        identity, bytes(range(40)), set_fingerprint=SET, geometry=geometry(), digests=bytes(range(64))
    )
    return identity, header


def signed(header: bytes, at: int, replacement: bytes) -> bytes:
    """The header with some bytes replaced and its SHA-256 made right again."""
    changed = bytearray(header)
    changed[at : at + len(replacement)] = replacement
    changed[-32:] = hashlib.sha256(changed[:-32]).digest()
    return bytes(changed)


@given(records())
def test_what_is_encoded_is_decoded(record) -> None:
    identity, token_ids, digests, shape = record
    header = encode_header(identity, token_ids, set_fingerprint=SET, geometry=shape, digests=digests)
    assert len(header) % BLOCK_BYTES == 0
    found = decode_header(header + b"pages")
    assert (found.identity, found.token_ids, found.digests) == (identity, token_ids, digests)
    assert (found.set_fingerprint, found.rank, found.world_size) == (SET, shape.rank, shape.world_size)
    assert found.layout == file_layout(identity, page_bytes=shape.page_bytes, row_stride=shape.row_stride)
    assert found.layout.num_digests * DIGEST_BYTES == len(digests)
    check_header(found, set_fingerprint=SET, geometry=shape)


@given(records(), st.integers(0, 4))
def test_the_invariant_digest_is_the_same_on_every_rank(record, rank) -> None:
    identity, token_ids, digests, shape = record
    other = geometry(rank, 5, page_tokens=identity.page_tokens, dim=64)
    digest = {
        decode_header(encode_header(identity, token_ids, set_fingerprint=SET, geometry=g, digests=d)).invariant_digest
        for g, d in ((shape, digests), (other, bytes(len(digests))))
    }
    assert len(digest) == 1


def test_the_invariant_digest_depends_on_every_invariant_field() -> None:
    identity, header = one_record()
    seen = {decode_header(header).invariant_digest, rank_invariant_digest(header, 10)}
    assert len(seen) == 1
    changes: list[dict] = [
        {"key": bytes(32)}, {"store_id": bytes(16)}, {"parent_key": b""}, {"parent_key": bytes(32)},
        {"start_key": bytes(32)}, {"start": 4, "end": 14}, {"has_row": False}, {"tail_tokens": 0, "end": 16},
    ]  # fmt: skip
    for number, change in enumerate(changes, 2):
        changed = msgspec.structs.replace(identity, **change)
        num_digests = changed.num_sections + changed.has_row
        again = encode_header(
            changed, bytes(4 * (changed.end - changed.start)), set_fingerprint=SET, geometry=geometry(),
            digests=bytes(16 * num_digests),
        )  # fmt: skip
        seen.add(decode_header(again).invariant_digest)
        assert len(seen) == number
    for tokens, fingerprint in ((bytes(40), SET), (bytes(range(40)), bytes(32))):
        again = encode_header(identity, tokens, set_fingerprint=fingerprint, geometry=geometry(), digests=bytes(64))
        seen.add(decode_header(again).invariant_digest)
    assert len(seen) == 1 + len(changes) + 2


def test_every_flipped_bit_of_a_header_is_found() -> None:
    _, header = one_record()
    data = bytearray(header)
    for bit in range(8 * len(data)):
        data[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(RecordError):
            decode_header(data)
        data[bit >> 3] ^= 1 << (bit & 7)
    decode_header(data)


def test_every_truncation_of_a_header_is_found() -> None:
    _, header = one_record()
    for length in range(len(header)):
        with pytest.raises(RecordError) as caught:
            decode_header(header[:length])
        assert caught.value.problem is Problem.TRUNCATED


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_record(data) -> None:
    with pytest.raises(RecordError):
        decode_header(data)


@pytest.mark.parametrize("length", [0, 100, 4097, MAX_HEADER_BYTES + 4096, 2**32 - 4096])
def test_a_length_that_no_header_has_is_refused_from_the_first_bytes(length) -> None:
    _, header = one_record()
    with pytest.raises(RecordError) as caught:
        header_length(header[:12] + struct.pack("<I", length))
    assert caught.value.problem is Problem.HEADER_DIGEST


def test_a_format_that_needs_a_newer_reader_is_named() -> None:
    _, header = one_record()
    with pytest.raises(RecordError, match="format 7 needs a reader of format 2, this is 1") as caught:
        decode_header(signed(header, 8, struct.pack("<HH", 7, 2)))
    assert caught.value.problem is Problem.NEWER_FORMAT


def test_a_newer_format_that_this_reader_may_read_is_read() -> None:
    identity, header = one_record()
    found = decode_header(signed(header, 8, struct.pack("<HH", 7, 1)))
    assert (found.identity, found.format) == (identity, 7)


INVARIANT_FIELDS = {"start": (160, "<Q"), "end": (168, "<Q"), "page_tokens": (176, "<I"), "tail_tokens": (180, "<I")}
BOUND_FIELDS = {name: (256 + 40 + 8 * at, "<Q") for at, name in enumerate(
    ("pages_at", "page_bytes", "tail_at", "tail_bytes", "row_at", "row_bytes", "file_bytes")
)} | {"num_pages": (256 + 96, "<I"), "algorithm": (256 + 100, "<I")}  # fmt: skip


@pytest.mark.parametrize("field", [*INVARIANT_FIELDS, *BOUND_FIELDS])
@pytest.mark.parametrize("change", [-1, 1, 4, 4096, 2**31])
def test_a_header_whose_numbers_contradict_each_other_is_refused(field, change) -> None:
    _, header = one_record()
    at, form = (INVARIANT_FIELDS | BOUND_FIELDS)[field]
    (value,) = struct.unpack_from(form, header, at)
    changed = signed(header, at, struct.pack(form, (value + change) % 2 ** (8 * struct.calcsize(form))))
    with pytest.raises(RecordError) as caught:
        decode_header(changed)
    assert caught.value.problem is Problem.INCONSISTENT


def test_sizes_that_are_no_multiple_of_a_block_are_refused() -> None:
    _, header = one_record()
    pages_end = 4096 + 2 * 4000
    sizes = [4096, 4000, pages_end, 4000, pages_end + 4000, 4096, pages_end + 4000 + 4096]
    with pytest.raises(RecordError) as caught:
        decode_header(signed(header, 256 + 40, struct.pack("<7Q", *sizes)))
    assert caught.value.problem is Problem.INCONSISTENT


def test_a_header_too_short_for_its_tokens_is_refused() -> None:
    _, header = one_record()
    with pytest.raises(RecordError, match="do not fit a header") as caught:
        decode_header(signed(header, 168, struct.pack("<Q", 8 + 4 * 2000 + 2)))
    assert caught.value.problem is Problem.INCONSISTENT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": b"short"}, "wrong length"),
        ({"store_id": bytes(32)}, "wrong length"),
        ({"parent_key": bytes(31)}, "wrong length"),
        ({"end": 8}, "empty"),
        ({"start": -4}, "empty"),
        ({"end": 2**41}, "too long"),
        ({"end": 8 + 2**20}, "too long"),
        ({"page_tokens": 0}, "pages of 0"),
        ({"tail_tokens": 4}, "4 tail tokens"),
        ({"start": 9, "end": 19}, "not whole pages"),
        ({"end": 19}, "not whole pages"),
    ],
)
def test_fields_that_no_record_has_are_not_encoded(change, words) -> None:
    identity = msgspec.structs.replace(one_record()[0], **change)
    assert words in (identity_problem(identity) or "")
    with pytest.raises(ValueError, match=words):
        encode_header(identity, b"", set_fingerprint=SET, geometry=geometry(), digests=b"")


def test_token_ids_and_digests_must_fit_the_identity() -> None:
    identity, _ = one_record()
    for token_ids, digests in ((bytes(36), bytes(64)), (bytes(40), bytes(48))):
        with pytest.raises(ValueError, match="do not fit"):
            encode_header(identity, token_ids, set_fingerprint=SET, geometry=geometry(), digests=digests)


def test_a_header_over_one_mebibyte_is_not_encoded() -> None:
    num_tokens = 260_000
    identity = msgspec.structs.replace(one_record()[0], start=0, end=num_tokens, tail_tokens=0, has_row=False)
    with pytest.raises(ValueError, match="over the limit"):
        encode_header(
            identity, bytes(4 * num_tokens), set_fingerprint=SET, geometry=geometry(), digests=bytes(4 * num_tokens)
        )


@pytest.mark.parametrize(
    ("fingerprint", "shape", "problem"),
    [
        (bytes(32), geometry(), Problem.OTHER_SET),
        (SET, geometry(1), Problem.OTHER_RANK),
        (SET, geometry(0, 3), Problem.OTHER_RANK),
        (SET, geometry(dim=16), Problem.OTHER_LAYOUT),
        (SET, geometry(dim=1024), Problem.OTHER_LAYOUT),
        (SET, geometry(row_bytes=9000), Problem.OTHER_LAYOUT),
    ],
)
def test_a_record_of_another_set_rank_or_layout_is_named(fingerprint, shape, problem) -> None:
    found = decode_header(one_record()[1])
    with pytest.raises(RecordError) as caught:
        check_header(found, set_fingerprint=fingerprint, geometry=shape)
    assert caught.value.problem is problem


def test_the_set_is_readable_before_anything_is_verified() -> None:
    _, header = one_record()
    assert claimed_set(header) == SET
    assert claimed_set(header[:47]) == b""


@given(records(), st.integers(0, 2_000_000))
def test_a_size_counts_as_the_largest_legal_one_not_above_it(record, size) -> None:
    identity, _, _, shape = record
    layout = file_layout(identity, page_bytes=shape.page_bytes, row_stride=shape.row_stride)
    legal = [end for end in (layout.pages_end, layout.tail_end, layout.row_end) if end <= size]
    assert layout.legal_size(size) == (max(legal) if legal else None)
    assert layout.legal_size(layout.row_end) == layout.row_end
    assert layout.has_tail == bool(identity.tail_tokens)
    assert layout.has_row == identity.has_row


@given(
    st.binary(min_size=16, max_size=16), st.integers(0, 7), st.integers(0, 1000) | st.just(ROW_INDEX), st.binary(),
    st.integers(0, 300),
)  # fmt: skip
def test_a_digest_is_bound_to_store_rank_and_index(store_id, rank, index, payload, cut) -> None:
    whole = memoryview(payload)
    digest = section_digest(store_id, rank, index=index, payload=[whole])
    assert section_digest(store_id, rank, index=index, payload=[whole[:cut], whole[cut:]]) == digest
    moved = bytes([store_id[0] ^ 1]) + store_id[1:]
    others = [
        section_digest(moved, rank, index=index, payload=[whole]),
        section_digest(store_id, rank + 1, index=index, payload=[whole]),
        section_digest(store_id, rank, index=index ^ 1, payload=[whole]),
        section_digest(store_id, rank, index=index, payload=[memoryview(payload + b"\0")]),
    ]
    assert digest not in others
