"""What a prompt can be restored from: against a brute-force oracle, and the rules one by one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.index import Record, RecordIndex
from flare_cache.lookup import TierIndex, deepest_record, find_restorable
from flare_cache.record_plan import RecordBounds, new_record, plan_store
from flare_core.keys import chain_keys, root_key, token_array
from flare_core.prefix import PrefixQuery, StoreRequest, Tier

PAGE = 4
ROOT = root_key(bytes(32), b"salt")


def query(tokens: list[int], *, device_pages: int = 0, device_tokens: int | None = None) -> PrefixQuery:
    ids = token_array(tokens)
    num_device = device_pages * PAGE if device_tokens is None else device_tokens
    return PrefixQuery(ROOT, ids, chain_keys(ROOT, ids, PAGE), device_pages, num_device)


def request(tokens: list[int], *, row: bool = False) -> StoreRequest:
    ids = token_array(tokens)
    keys = chain_keys(ROOT, ids, PAGE)
    tail_page = 900 if len(tokens) % PAGE else None
    return StoreRequest(ROOT, ids, keys, list(range(len(keys))), tail_page, 3 if row else None, after_step=1)


class Shelf:
    """An index into which prompts are stored at once."""

    def __init__(self, *, max_sections: int = 3, min_tail: int = 1) -> None:
        self.index = RecordIndex(PAGE)
        self.bounds = RecordBounds(PAGE, max_sections, min_tail)
        self.ids = itertools.count()

    def store(self, tokens: list[int], *, row: bool = False) -> list[Record]:
        draw = lambda: next(self.ids).to_bytes(16, "little")  # noqa: E731
        records = []
        for planned in plan_store(request(tokens, row=row), self.index, self.bounds, draw_store_id=draw):
            parent = self.index.get(planned.identity.parent_key) if planned.identity.parent_key else None
            record = new_record(planned, parent, 1)
            self.index.add(record)
            self.index.mark_stored(record)
            records.append(record)
        return records

    def find(self, tokens: list[int], **options):
        return find_restorable(query(tokens), [TierIndex(Tier.DISK, self.index)], page_tokens=PAGE, **options)


def tokens_of(shelf: Shelf, segments) -> list[int]:
    """The ids that the segments' sections hold, cut to what each contributes."""
    ids: list[int] = []
    for segment in segments:
        record = shelf.index.get(segment.record_key)
        held: list[int] = []
        for section in range(segment.first_section, segment.first_section + segment.num_sections):
            held += np.frombuffer(record.section_ids(section), "<u4").tolist()
        assert len(ids) == segment.first_page * PAGE
        ids += held[: segment.num_tokens]
    return ids


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@settings(max_examples=300, deadline=None)
@given(st.lists(prompts, max_size=6), prompts, st.integers(1, 4))
def test_the_longest_common_prefix_with_any_stored_prompt_is_found(stored, wanted, max_sections):
    shelf = Shelf(max_sections=max_sections)
    for tokens in stored:
        shelf.store(tokens)
    found = shelf.find(wanted, has_rows=False)
    longest = max((len(shared(tokens, wanted)) for tokens in stored), default=0)
    assert found.num_tokens == longest
    assert tokens_of(shelf, found.segments) == wanted[:longest]
    assert sum(segment.num_tokens for segment in found.segments) == longest


def shared(first: list[int], second: list[int]) -> list[int]:
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


@settings(max_examples=300, deadline=None)
@given(st.lists(prompts, max_size=6), prompts)
def test_a_model_with_rows_resumes_at_the_longest_stored_prompt_that_is_a_prefix(stored, wanted):
    shelf = Shelf(max_sections=2)
    ends = []
    for tokens in stored:
        records = shelf.store(tokens, row=True)
        if any(shelf.index.get(record.key).has_row for record in records):
            ends.append(tokens)
    found = shelf.find(wanted, has_rows=True)
    expected = max((len(tokens) for tokens in ends if wanted[: len(tokens)] == tokens), default=0)
    assert found.num_tokens == expected
    assert tokens_of(shelf, found.segments) == wanted[:expected]
    assert [segment.with_row for segment in found.segments] == [False] * (len(found.segments) - 1) + [True] * bool(
        expected
    )


def test_every_row_asked_for_is_stored_even_inside_a_record():
    shelf = Shelf(max_sections=8)
    shelf.store([1, 2, 3, 4, 5, 6, 7, 8, 9], row=True)
    assert shelf.store([1, 2, 3, 4], row=True)
    assert shelf.find([1, 2, 3, 4, 0, 0], has_rows=True).num_tokens == 4


def test_memory_is_preferred_and_disk_goes_on_where_memory_ends():
    memory, disk = Shelf(), Shelf()
    memory.store([1, 2, 3, 4, 5, 6, 7, 8])
    disk.store([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    tiers = [TierIndex(Tier.MEMORY, memory.index), TierIndex(Tier.DISK, disk.index)]
    found = find_restorable(query([*range(1, 13), 13]), tiers, page_tokens=PAGE, has_rows=False)
    assert [(s.tier, s.first_section, s.num_sections, s.first_page, s.num_tokens) for s in found.segments] == [
        (Tier.MEMORY, 0, 2, 0, 8),
        (Tier.DISK, 2, 1, 2, 4),
    ]


def test_pages_that_the_device_holds_are_not_fetched_again():
    shelf = Shelf(max_sections=8)
    shelf.store(list(range(14)))
    tiers = [TierIndex(Tier.DISK, shelf.index)]
    held = query(list(range(14)), device_pages=2, device_tokens=9)
    found = find_restorable(held, tiers, page_tokens=PAGE, has_rows=False)
    assert [(s.first_section, s.num_sections, s.first_page, s.num_tokens) for s in found.segments] == [(2, 2, 2, 5)]
    assert found.num_tokens == 14


def test_a_restore_that_adds_too_little_is_not_offered():
    shelf = Shelf()
    shelf.store([1, 2, 3])
    assert shelf.find([1, 2, 9], has_rows=False, min_tokens=3).segments == ()
    assert shelf.find([1, 2, 3], has_rows=False, min_tokens=3).num_tokens == 3


def test_a_record_on_its_way_is_planned_around_but_not_offered():
    shelf = Shelf()
    plan = lambda: plan_store(request([1, 2, 3, 4]), shelf.index, shelf.bounds, draw_store_id=lambda: bytes(16))  # noqa: E731
    (planned,) = plan()
    shelf.index.add(new_record(planned, None, 1))
    assert plan() == []
    assert shelf.find([1, 2, 3, 4], has_rows=False).segments == ()


def test_a_hidden_record_is_not_offered_and_its_pages_can_be_planned_anew():
    shelf = Shelf(max_sections=1)
    first, second = shelf.store([1, 2, 3, 4, 5, 6, 7, 8])
    shelf.index.hide(second)
    assert shelf.find([1, 2, 3, 4, 5, 6, 7, 8], has_rows=False).num_tokens == 4
    shelf.index.remove(second)
    assert second.key not in first.children
    assert [record.identity.start for record in shelf.store([1, 2, 3, 4, 5, 6, 7, 8])] == [4]


def test_truncation_takes_the_tail_or_only_the_row_from_what_is_offered():
    shelf = Shelf()
    (record,) = shelf.store([1, 2, 3, 4, 5, 6], row=True)
    shelf.index.truncated(record, keep_tail=True)
    assert shelf.find([1, 2, 3, 4, 5, 6], has_rows=True).segments == ()
    assert shelf.find([1, 2, 3, 4, 5, 6], has_rows=False).num_tokens == 6
    shelf.index.truncated(record, keep_tail=False)
    assert shelf.find([1, 2, 3, 4, 5, 6], has_rows=False).num_tokens == 4


def test_a_tail_that_a_later_page_or_tail_begins_with_is_covered():
    shelf = Shelf(max_sections=8)
    (short,) = shelf.store([1, 2, 3, 4, 5])
    (longer,) = shelf.store([1, 2, 3, 4, 5, 6])
    (other,) = shelf.store([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert shelf.index.covered_tails(longer) == [short]
    assert set(shelf.index.covered_tails(other)) == {short, longer}
    assert shelf.index.covered_tails(short) == []


def test_the_deepest_record_of_a_prompt_is_found_for_the_order_of_use():
    shelf = Shelf(max_sections=1)
    first, second = shelf.store([1, 2, 3, 4, 5, 6, 7, 8])
    assert deepest_record(query([1, 2, 3, 4, 5, 6, 7, 8, 9]), shelf.index) is second
    assert deepest_record(query([1, 2, 3, 4, 5]), shelf.index) is first
    assert deepest_record(query([9, 9, 9, 9]), shelf.index) is None
