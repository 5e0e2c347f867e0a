"""What waits to be put into the pool: in which order, for how long, how often; and what the pool is found to lack."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_cache.index import Record
from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.break_even import BreakEven
from flare_cache.pool.messages import Presence, Refused, RefusedReason
from flare_cache.pool.outbox import Outbox
from flare_cache.pool.puts import extent_of
from flare_cache.pool.reconcile import CHUNK_KEYS, Reconciliation
from flare_cache.pool.url import parse_pool_url
from flare_core.errors import UsageError


def record(
    name: int, *, first_page: int = 0, num_bytes: int = 10, tail_tokens: int = 0, has_row: bool = False
) -> Record:
    start = 4 * first_page
    identity = RecordIdentity(
        key=name.to_bytes(32, "big"), store_id=bytes(16), parent_key=b"", start_key=bytes(32), start=start,
        end=start + 4 + tail_tokens, page_tokens=4, tail_tokens=tail_tokens, has_row=has_row,
    )  # fmt: skip
    return Record(identity, b"", num_bytes, tail_tokens=tail_tokens, has_row=has_row, is_stored=True)


class Pins:
    def __init__(self) -> None:
        self.held: list[Record] = []


def new_box(pins: Pins | None = None, *, limit_bytes: int = 100, seconds: float = 60.0) -> Outbox:
    pins = pins or Pins()
    return Outbox(limit_bytes, seconds, pins.held.append, pins.held.remove)


def test_roots_go_before_what_extends_them_whatever_came_first() -> None:
    box = new_box()
    for name, first_page in ((1, 5), (2, 0), (3, 2), (4, 0)):
        box.add(record(name, first_page=first_page), 0.0)
    order = []
    while (out := box.next(0.0)) is not None:
        order.append(int.from_bytes(out.record.key, "big"))
    assert order == [2, 4, 3, 1]


def test_a_record_waits_until_what_it_extends_has_left_the_box_for_whatever_reason() -> None:
    box = new_box()
    parent, child = record(1), record(2, first_page=1)
    child.parent = parent
    box.add(child, 0.0)
    box.add(parent, 0.0)
    out = box.next(0.0)
    assert out.record is parent
    assert box.next(0.0) is None
    box.again(out, 0.0, is_fault=False)
    out = box.next(0.0)
    assert (out.record, box.next(0.0)) == (parent, None)
    box.done(out)
    assert box.next(0.0).record is child


def test_a_record_is_pinned_for_as_long_as_it_is_in_the_box() -> None:
    pins = Pins()
    box = new_box(pins)
    first, second = record(1), record(2)
    box.add(first, 0.0)
    box.add(second, 0.0)
    assert pins.held == [first, second]
    box.done(box.next(0.0))
    assert pins.held == [second]
    box.settle(second.key)
    assert (pins.held, len(box), box.num_bytes) == ([], 0, 0)


def test_what_is_over_the_budget_or_waits_too_long_is_dropped_and_counted() -> None:
    pins = Pins()
    box = new_box(pins, limit_bytes=25, seconds=10.0)
    assert [box.add(record(name), float(name)) for name in range(3)] == [True, True, False]
    box.drop_late(10.5)
    assert dict(box.dropped) == {"full": 1, "late": 1}
    assert len(pins.held) == 1


def test_a_record_that_left_its_tier_is_dropped_when_its_turn_comes() -> None:
    box = new_box()
    gone = record(1)
    box.add(gone, 0.0)
    gone.is_usable = False
    assert box.next(0.0) is None
    assert dict(box.dropped) == {"gone": 1}


def test_a_failed_put_waits_longer_each_time_and_is_given_up_in_the_end() -> None:
    box = new_box()
    box.add(record(1), 0.0)
    now, waits = 0.0, []
    while len(box):
        out = box.next(now)
        if out is None:
            now += 0.25
            continue
        box.again(out, now, is_fault=True)
        waits.append(out.not_before - now)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert dict(box.dropped) == {"failed": 1}


def test_what_waits_for_a_record_that_cannot_be_put_is_given_up_with_it() -> None:
    # Left in the box, each would have the failing record put again for its sake, and wait for it again.
    pins = Pins()
    box = new_box(pins)
    chain = [record(name, first_page=name) for name in range(4)]
    for parent, child in pairwise(chain):
        child.parent = parent
    for one in [*chain, other := record(9, first_page=9)]:
        box.add(one, 0.0)
    now = 0.0
    while chain[0].key in box:
        while (out := box.next(now)) is not None:
            if out.record is not other:
                box.again(out, now, is_fault=True)
        now += 0.25
    assert dict(box.dropped) == {"failed": 1, "parent": 3}
    assert pins.held == [other]


def test_a_put_that_the_end_of_a_session_stopped_is_no_fault_of_the_record() -> None:
    box = new_box()
    box.add(record(1), 0.0)
    for _ in range(20):
        box.again(box.next(0.0), 0.0, is_fault=False)
    assert len(box) == 1


@given(st.lists(st.tuples(st.sampled_from(["add", "next", "done", "again", "drop", "settle"]), st.integers(0, 4))))
def test_bytes_and_pins_are_those_of_the_records_in_the_box(events) -> None:
    pins = Pins()
    box = new_box(pins, limit_bytes=40)
    records = [record(name, first_page=name, num_bytes=5 + name) for name in range(5)]
    records[2].parent, records[4].parent = records[1], records[2]
    under_way = []
    for what, name in events:
        match what:
            case "add":
                box.add(records[name], 0.0)
            case "next":
                under_way += [out for out in [box.next(0.0)] if out is not None]
            case "settle":
                box.settle(records[name].key)
            case _ if under_way:
                out = under_way.pop(0)
                {
                    "done": box.done,
                    "drop": lambda o: box.drop(o, "failed"),
                    "again": lambda o: box.again(o, 0.0, is_fault=False),
                }[what](out)
        assert len(pins.held) == len(box)
        assert sum(one.num_bytes for one in pins.held) == box.num_bytes <= 40
        assert box.num_under_way == len(under_way)


@pytest.mark.parametrize(
    ("made", "has_row", "tail_tokens", "expected"),
    [
        (record(1, tail_tokens=2, has_row=True), True, 2, Extent.ROW),
        (record(1, tail_tokens=2, has_row=True), False, 2, Extent.TAIL),
        (record(1, tail_tokens=2, has_row=True), False, 0, Extent.PAGES),
        (record(1, has_row=True), False, 0, Extent.TAIL),
        (record(1, tail_tokens=2), False, 2, Extent.ROW),
        (record(1, tail_tokens=2), False, 0, Extent.PAGES),
        (record(1), False, 0, Extent.ROW),
    ],
)
def test_the_extent_of_a_put_is_what_is_left_of_the_record(made, has_row, tail_tokens, expected) -> None:
    made.has_row, made.tail_tokens = has_row, tail_tokens
    assert extent_of(made) is expected


def test_all_keys_are_asked_about_in_chunks_and_the_missing_ones_are_given_in_order() -> None:
    keys = [name.to_bytes(32, "big") for name in range(CHUNK_KEYS + 3)]
    asked = Reconciliation(keys)
    sizes, missing = [], []
    while (request := asked.next_request()) is not None:
        count = len(request.keys) // 32
        sizes.append(count)
        assert asked.is_asking
        asked.answered(Presence(present=bytes(number % 2 for number in range(count))))
        while (key := asked.first_missing()) is not None:
            missing.append(key)
            asked.drop_first()
    assert sizes == [CHUNK_KEYS, 3]
    assert missing == keys[::2]
    assert asked.is_over


@pytest.mark.parametrize("reply", [None, Refused(reason=RefusedReason.BUSY), Presence(present=b"\x01\x01")])
def test_without_a_sound_answer_nothing_more_is_asked_and_nothing_is_taken_for_missing(reply) -> None:
    asked = Reconciliation([bytes(32)])
    asked.next_request()
    assert asked.answered(reply) == []
    assert asked.is_over


def test_a_restore_is_refused_when_computing_is_quicker_and_tried_again_now_and_then() -> None:
    rates = BreakEven()
    restore = {"num_tokens": 1000, "num_bytes": 100_000_000}
    assert rates.is_worth(**restore, now=0.0)
    rates.prefilled(1000, 1.0)
    assert rates.is_worth(**restore, now=0.0)
    rates.fetched(10_000_000, 1.0)
    # 10 s against 1 s: once as a probe, then not until its time has come again.
    assert [rates.is_worth(**restore, now=now) for now in (1.0, 2.0, 30.0, 32.0)] == [True, False, False, True]
    assert rates.rates.num_refused == 2
    for _ in range(40):
        rates.fetched(1_000_000_000, 1.0)
    assert rates.is_worth(**restore, now=33.0)


def test_small_restores_tell_of_the_latency_and_say_nothing_of_the_rate() -> None:
    rates = BreakEven()
    rates.prefilled(1000, 1.0)
    rates.fetched(50_000, 0.02)
    assert rates.rates.pool_bytes_per_second is None
    assert rates.is_worth(num_tokens=1000, num_bytes=1 << 40, now=0.0)
    assert [rates.is_worth(num_tokens=10, num_bytes=1, now=now) for now in (1.0, 2.0)] == [True, False]


def test_who_always_wants_to_restore_does() -> None:
    rates = BreakEven(is_always=True)
    rates.prefilled(1000, 0.001)
    rates.fetched(50_000, 10.0)
    assert all(rates.is_worth(num_tokens=1, num_bytes=50_000, now=float(now)) for now in range(3))


@pytest.mark.parametrize(
    ("text", "shown", "is_loopback"),
    [
        ("selene://127.0.0.1", "selene://127.0.0.1:7420", True),
        ("selenes://a:1,[::1]:2", "selenes://a:1,[::1]:2", False),
        ("selene://localhost:9/", "selene://localhost:9", True),
    ],
)
def test_a_pool_is_named_by_scheme_and_places(text, shown, is_loopback) -> None:
    url = parse_pool_url(text)
    assert (str(url), url.is_loopback) == (shown, is_loopback)
    assert parse_pool_url(str(url)) == url


@pytest.mark.parametrize(
    "text", ["", "host:1", "http://h:1", "selene://", "selene://h:0", "selene://h:70000", "selene://a,,b"]
)
def test_another_url_is_refused_and_what_is_wrong_is_named(text) -> None:
    with pytest.raises(UsageError, match="is not"):
        parse_pool_url(text)
