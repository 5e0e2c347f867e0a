"""What goes when space is needed: oldest use first, leaves before parents, never what is pinned."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.eviction import Budget, DropRow, Evict, choose_relief
from flare_cache.index import Record, RecordIndex
from flare_cache.jobs import RecordIdentity

PAGE = 4


def make(number: int, parent: Record | None, *, has_row: bool = False, num_pages: int = 1) -> Record:
    start = parent.identity.end if parent is not None else 0
    identity = RecordIdentity(
        key=number.to_bytes(32, "big"), store_id=bytes(16), parent_key=parent.key if parent else b"",
        start_key=bytes([number % 256]) * 32, start=start, end=start + PAGE * num_pages, page_tokens=PAGE,
        tail_tokens=0, has_row=has_row,
    )  # fmt: skip
    return Record(identity, bytes(4 * PAGE * num_pages), 10, 0, has_row, parent)


def tree(parents: list[int | None], index: RecordIndex, *, has_row: bool = False) -> list[Record]:
    records: list[Record] = []
    for number, parent in enumerate(parents):
        record = make(number, None if parent is None else records[parent], has_row=has_row)
        index.add(record)
        index.mark_stored(record)
        records.append(record)
    return records


def victims(index: RecordIndex, num_bytes: int, **options) -> list[int]:
    return [
        int.from_bytes(relief.record.key, "big")
        for relief in choose_relief(index, num_bytes, row_bytes=lambda _: 4, **options)
    ]


def test_the_oldest_leaf_goes_first_and_a_parent_after_its_children():
    index = RecordIndex(PAGE)
    records = tree([None, 0, 0, None], index)
    for number in (3, 1, 2):
        index.use(records[number])
    assert victims(index, 10) == [3]
    assert victims(index, 25) == [3, 1, 2]
    assert victims(index, 40) == [3, 1, 2, 0]


def test_pinned_records_and_records_on_their_way_stay_with_their_ancestors():
    index = RecordIndex(PAGE)
    records = tree([None, 0, None, 2], index)
    records[1].num_pins = 1
    coming = make(9, records[3])
    index.add(coming)
    assert victims(index, 100) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_choice_leaves_the_rest_closed_under_parents(data):
    index = RecordIndex(PAGE)
    parents = [
        data.draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        for number in range(data.draw(st.integers(1, 12)))
    ]
    records = tree(parents, index)
    for number in data.draw(st.lists(st.integers(0, len(records) - 1), max_size=20)):
        index.use(records[number])
    pinned = data.draw(st.sets(st.integers(0, len(records) - 1)))
    for number in pinned:
        records[number].num_pins = 1
    needed = data.draw(st.integers(1, 150))
    gone: set[int] = set()
    for number in victims(index, needed):
        assert number not in pinned
        assert all(int.from_bytes(child, "big") in gone for child in records[number].children)
        gone.add(number)
    can_go = [n for n in range(len(records)) if not any(m in pinned for m in below(records[n]))]
    assert 10 * len(gone) >= min(needed, 10 * len(can_go))


def below(record: Record) -> set[int]:
    return {int.from_bytes(one.key, "big") for one in record.subtree()}


def test_a_row_is_dropped_only_where_a_row_further_on_stands_in():
    index = RecordIndex(PAGE)
    records = tree([None, 0, 1], index, has_row=True)
    records[2].num_pins = 1
    chosen = choose_relief(index, 100, row_bytes=lambda _: 4, row_spacing=12)
    assert [(type(relief), relief.record) for relief in chosen] == [(DropRow, records[1]), (DropRow, records[0])]
    chosen = choose_relief(index, 100, row_bytes=lambda _: 4, row_spacing=8)
    assert [(type(relief), relief.record) for relief in chosen] == [(DropRow, records[1])]
    records[2].num_pins = 0
    assert [type(relief) for relief in choose_relief(index, 100, row_bytes=lambda _: 4)] == [Evict, Evict, Evict]


def test_the_budget_knows_how_much_is_short():
    budget = Budget(100)
    budget.charge(70)
    assert (budget.shortage(30), budget.shortage(31)) == (0, 1)
    budget.credit(20)
    assert budget.shortage(50) == 0
