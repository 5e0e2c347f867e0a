"""The page pool's states, and that they always add up."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flare_core.engine.page_pool import PagePool
from flare_core.engine.row_slots import RowSlots


def test_the_lowest_free_pages_are_given_out_first():
    pool = PagePool(8)
    first = pool.allocate(3)
    pool.release([1])
    assert first == [0, 1, 2]
    assert pool.allocate(3) == [1, 3, 4]


def test_more_pages_than_are_free_are_refused_whole():
    pool = PagePool(2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2


def test_a_released_page_that_the_index_knows_is_cached_until_it_is_forgotten():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.set_cached(page, True)
    assert pool.release([page]) == [page]
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.set_cached(page, False)
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_a_page_pinned_by_a_transfer_is_not_free_when_its_sequence_lets_go():
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.pin([page])
    pool.release([page])
    assert pool.allocate(1) is None
    assert pool.num_pinned_only == 1
    pool.unpin([page])
    assert pool.allocate(1) == [page]


def test_a_quarantined_page_is_never_given_out_again():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.pin([page])
    pool.quarantine([page])
    pool.release([page])
    pool.unpin([page])
    assert pool.allocate(2) is None
    assert pool.num_quarantined == 1
    pool.check()


@pytest.mark.parametrize("misuse", ["release", "unpin", "pin", "quarantine", "acquire"])
def test_counting_below_zero_is_a_fault(misuse):
    pool = PagePool(1)
    with pytest.raises(AssertionError, match="page 0"):
        getattr(pool, misuse)([0])


class PoolMachine(RuleBasedStateMachine):
    """Random use; a shadow of references and pins says what is allowed."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(6)
        self.refs = []
        self.pins = []

    @rule(count=st.integers(1, 3))
    def allocate(self, count):
        self.refs.extend(self.pool.allocate(count) or [])

    @rule(data=st.data())
    def release(self, data):
        if self.refs:
            page = data.draw(st.sampled_from(self.refs))
            self.refs.remove(page)
            self.pool.release([page])

    @rule(data=st.data(), cached=st.booleans())
    def use(self, data, cached):
        if self.refs:
            page = data.draw(st.sampled_from(self.refs))
            self.pool.pin([page])
            self.pins.append(page)
            self.pool.set_cached(page, cached)

    @rule(data=st.data())
    def share(self, data):
        if self.refs:
            page = data.draw(st.sampled_from(self.refs))
            self.pool.acquire([page])
            self.refs.append(page)

    @rule(data=st.data())
    def unpin(self, data):
        if self.pins:
            page = data.draw(st.sampled_from(self.pins))
            self.pins.remove(page)
            self.pool.unpin([page])

    @rule(data=st.data())
    def quarantine(self, data):
        if self.pins:
            self.pool.quarantine([data.draw(st.sampled_from(self.pins))])

    @invariant()
    def it_adds_up(self):
        self.pool.check()
        assert self.pool.num_held <= len(set(self.refs) | set(self.pins))


PoolMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_snapshot_slots_lie_behind_the_sequences_and_the_oldest_cached_one_is_reused():
    rows = RowSlots(2, 2)
    first, second = rows.take_snapshot(), rows.take_snapshot()
    assert (first, second) == (2, 3)
    assert rows.take_snapshot() is None
    for slot in (first, second):
        rows.set_cached(slot, True)
        rows.drop(slot)
    rows.set_cached(first, True)
    assert rows.oldest_cached() == second
    rows.hold(second)
    assert rows.oldest_cached() == first
    rows.check(set())


def test_a_sequence_slot_freed_twice_is_a_fault():
    rows = RowSlots(1, 0)
    slot = rows.take_sequence()
    rows.free_sequence(slot)
    with pytest.raises(AssertionError, match="slot 0"):
        rows.free_sequence(slot)
