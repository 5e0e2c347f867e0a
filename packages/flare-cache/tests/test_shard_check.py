"""A shard that is checked while it arrives gets the verdict that it would get as a whole, whatever the order."""

from __future__ import annotations

import contextlib
import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_cache.digest import ROW_INDEX, section_digest
from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.core_words import ShardFacts
from flare_cache.pool.shard_check import ShardCheck, check_shard
from flare_cache.record import RecordError, encode_header, file_layout
from flare_core.geometry import Axis, Geometry, Plane

SET = bytes(range(32))
PAGE_TOKENS = 4
GEOMETRY = Geometry(1, 2, PAGE_TOKENS, (Plane("kv", "float32", (Axis("token", PAGE_TOKENS), Axis("dim", 8))),), 100)


def make_shard(num_pages: int, *, tail_tokens: int = 2, has_row: bool = True) -> tuple[RecordIdentity, bytearray]:
    """A sound shard of rank 1, each section of other bytes."""
    record = RecordIdentity(
        key=bytes([1] * 32), store_id=bytes([2] * 16), parent_key=b"", start_key=bytes([4] * 32), start=0,
        end=num_pages * PAGE_TOKENS + tail_tokens, page_tokens=PAGE_TOKENS, tail_tokens=tail_tokens, has_row=has_row,
    )  # fmt: skip
    layout = file_layout(record, page_bytes=GEOMETRY.page_bytes, row_stride=GEOMETRY.row_stride)
    sizes = [layout.page_bytes] * record.num_sections + [layout.row_end - layout.tail_end] * has_row
    sections = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    indexes = [*range(record.num_sections), *([ROW_INDEX] if has_row else [])]
    digests = b"".join(
        section_digest(record.store_id, GEOMETRY.rank, index=index, payload=[memoryview(section)])
        for index, section in zip(indexes, sections, strict=True)
    )
    token_ids = hashlib.sha256(b"ids").digest() * record.end
    header = encode_header(record, token_ids[: 4 * record.end], set_fingerprint=SET, geometry=GEOMETRY, digests=digests)
    return record, bytearray(header + b"".join(sections))


def verdict(check: ShardCheck) -> ShardFacts | str:
    try:
        return check.finish()
    except RecordError as error:
        return str(error)


def whole_verdict(data: memoryview, record: RecordIdentity) -> ShardFacts | str:
    with contextlib.suppress(RecordError):
        return check_shard(
            data, record=record, extent=Extent.ROW, set_fingerprint=SET, rank=GEOMETRY.rank, world_size=2
        )
    return verdict(ShardCheck(data, record, Extent.ROW, SET, GEOMETRY.rank, 2))


@given(st.data())
def test_arriving_in_pieces_changes_no_verdict(data) -> None:
    record, shard = make_shard(data.draw(st.integers(1, 6)))
    if data.draw(st.booleans()):
        shard[data.draw(st.integers(0, len(shard) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cuts = sorted({0, len(shard), *data.draw(st.lists(st.integers(1, len(shard) - 1), max_size=8))})
    pieces = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    landing = bytearray(len(shard))
    check = ShardCheck(memoryview(landing), record, Extent.ROW, SET, GEOMETRY.rank, 2)
    for start, end in pieces:
        landing[start:end] = shard[start:end]
        check.arrived(start, end - start)
    assert verdict(check) == whole_verdict(memoryview(shard), record)


def test_a_sound_shard_is_told_and_a_flipped_bit_is_named() -> None:
    record, shard = make_shard(3)
    facts = whole_verdict(memoryview(shard), record)
    assert isinstance(facts, ShardFacts)
    assert facts.num_bytes == len(shard)
    shard[-5000] ^= 1
    check = ShardCheck(memoryview(shard), record, Extent.ROW, SET, GEOMETRY.rank, 2)
    check.arrived(0, len(shard))
    with pytest.raises(RecordError, match="section 3"):
        check.finish()


def test_what_was_checked_on_its_way_is_not_read_again() -> None:
    record, shard = make_shard(3)
    check = ShardCheck(memoryview(shard), record, Extent.ROW, SET, GEOMETRY.rank, 2)
    check.arrived(0, len(shard))
    shard[-5000] ^= 1  # nobody would: what has arrived changes no more
    assert isinstance(verdict(check), ShardFacts)


def test_a_header_is_not_believed_before_all_of_it_has_come() -> None:
    """Padding that has not come yet is zero, as it should be: only what came counts."""
    record, shard = make_shard(1)
    shard[408] ^= 1
    check = ShardCheck(memoryview(bytearray(len(shard))), record, Extent.ROW, SET, GEOMETRY.rank, 2)
    for start, end in ((0, 408), (409, len(shard)), (408, 409)):
        check.data[start:end] = shard[start:end]
        check.arrived(start, end - start)
    with pytest.raises(RecordError, match="SHA-256"):
        check.finish()


def test_what_lay_in_a_buffer_before_is_not_taken_for_what_came() -> None:
    record, shard = make_shard(2)
    used = memoryview(bytearray(shard))
    shard[-5000] ^= 1
    shard[100] ^= 1
    check = ShardCheck(used, record, Extent.ROW, SET, GEOMETRY.rank, 2)
    for start, end in ((0, 64), (4096, len(shard)), (64, 4096)):
        used[start:end] = shard[start:end]
        check.arrived(start, end - start)
    with pytest.raises(RecordError):
        check.finish()
