"""From a computed prefix to records: bounds, parents, tails, rows, sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.index import RecordIndex
from flare_cache.jobs import RecordIdentity
from flare_cache.record import MAX_HEADER_BYTES, file_layout, identity_problem
from flare_cache.record_plan import FileSizes, RecordBounds, new_record, plan_store, record_bounds
from flare_core.geometry import Axis, Geometry, Plane
from flare_core.keys import chain_keys, next_key, root_key, token_array
from flare_core.prefix import StoreRequest

PAGE = 4
ROOT = root_key(bytes(32), b"")


def request(num_tokens: int, *, row_slot: int | None = None, first_token: int = 0) -> StoreRequest:
    ids = token_array(range(first_token, first_token + num_tokens))
    keys = chain_keys(ROOT, ids, PAGE)
    tail_page = 99 if num_tokens % PAGE else None
    return StoreRequest(ROOT, ids, keys, [10 + at for at in range(len(keys))], tail_page, row_slot, after_step=1)


def plan(wanted: StoreRequest, index: RecordIndex, *, max_sections: int = 3, min_tail: int = 1):
    return plan_store(wanted, index, RecordBounds(PAGE, max_sections, min_tail), draw_store_id=lambda: bytes(16))


def store(wanted: StoreRequest, index: RecordIndex, **options):
    planned = plan(wanted, index, **options)
    for one in planned:
        record = new_record(one, index.get(one.identity.parent_key), 1)
        index.add(record)
        index.mark_stored(record)
    return planned


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_a_chain_covers_the_prompt_once_and_every_record_is_well_formed(first, second, max_sections, has_row):
    index = RecordIndex(PAGE)
    covered = 0
    for num_tokens in sorted({first, second}):
        wanted = request(num_tokens, row_slot=7 if has_row else None)
        planned = store(wanted, index, max_sections=max_sections)
        for one in planned:
            identity = one.identity
            assert identity_problem(identity) is None
            assert identity.num_sections == len(one.sections) <= max_sections
            assert one.token_ids == wanted.token_ids[identity.start : identity.end].tobytes()
            keys = chain_keys(identity.start_key, token_array(np.frombuffer(one.token_ids, "<u4")), PAGE)
            end_key = keys[-1] if keys else identity.start_key
            if identity.tail_tokens:
                end_key = next_key(end_key, wanted.token_ids[identity.end - identity.tail_tokens : identity.end])
            assert identity.key == end_key
            covered = max(covered, identity.end)
        assert covered == num_tokens
        assert [one.row_slot for one in planned if one.row_slot is not None] == ([7] if has_row and planned else [])
        assert plan(wanted, index, max_sections=max_sections) == []


def test_a_child_begins_at_a_page_boundary_inside_its_parent():
    index = RecordIndex(PAGE)
    (parent,) = store(request(12), index)
    diverging = token_array([*range(8), 50, 51, 52, 53])
    wanted = StoreRequest(ROOT, diverging, chain_keys(ROOT, diverging, PAGE), [0, 1, 2], None, None, after_step=1)
    (child,) = plan(wanted, index)
    assert child.identity.parent_key == parent.identity.key
    assert (child.identity.start, child.identity.end) == (8, 12)
    assert [section.page for section in child.sections] == [2]


def test_short_tails_are_not_stored_unless_a_row_needs_them():
    assert plan(request(2), RecordIndex(PAGE), min_tail=3) == []
    assert [one.identity.end for one in plan(request(6), RecordIndex(PAGE), min_tail=3)] == [4]
    assert [one.identity.end for one in plan(request(6, row_slot=0), RecordIndex(PAGE), min_tail=3)] == [6]


def test_a_tail_that_a_stored_page_begins_with_is_not_stored():
    index = RecordIndex(PAGE)
    store(request(8), index)
    assert plan(request(6), index) == []


def test_nothing_is_stored_beside_a_record_of_the_same_name_that_is_on_its_way_out():
    index = RecordIndex(PAGE)
    store(request(4), index)
    index.hide(next(index.records()))
    assert plan(request(4), index) == []


def geometry(rank: int, heads: int, *, row_bytes: int = 0) -> Geometry:
    axes = (Axis("layer", 2), Axis("kv", 2), Axis("token", 64), Axis("head", heads), Axis("dim", 64))
    return Geometry(rank, 2, 64, (Plane("kv", "float32", axes),), row_bytes)


def test_bytes_are_planned_by_the_rank_with_the_largest_file():
    geometries = [geometry(0, 2, row_bytes=5000), geometry(1, 1, row_bytes=5000)]
    bounds = record_bounds(geometries, min_tail_tokens=16, max_record_bytes=8 << 20)
    assert bounds.record_tokens == bounds.max_sections * 64
    num_tokens = bounds.record_tokens
    identity = RecordIdentity(
        key=bytes(32), store_id=bytes(16), parent_key=b"", start_key=bytes(32), start=0, end=num_tokens - 60,
        page_tokens=64, tail_tokens=4, has_row=True,
    )  # fmt: skip
    largest = file_layout(identity, page_bytes=geometries[0].page_bytes, row_stride=8192)
    sizes = FileSizes(geometries)
    assert sizes.largest(identity, has_tail=True, has_row=True) == largest.row_end <= 8 << 20
    assert sizes.largest(identity, has_tail=True, has_row=False) == largest.tail_end
    assert sizes.largest(identity, has_tail=False, has_row=False) == largest.pages_end


@pytest.mark.parametrize("heads", [1, 8])
def test_a_full_record_keeps_header_and_file_within_their_bounds(heads):
    small = Geometry(0, 1, 64, (Plane("kv", "uint8", (Axis("token", 64), Axis("dim", heads))),))
    bounds = record_bounds([small], min_tail_tokens=1)
    identity = RecordIdentity(
        key=bytes(32), store_id=bytes(16), parent_key=b"", start_key=bytes(32), start=0,
        end=bounds.record_tokens, page_tokens=64, tail_tokens=0, has_row=True,
    )  # fmt: skip
    layout = file_layout(identity, page_bytes=small.page_bytes, row_stride=0)
    assert layout.header_bytes <= MAX_HEADER_BYTES
    assert layout.row_end <= 256 << 20
