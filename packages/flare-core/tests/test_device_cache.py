"""What the device index finds: whole pages by key and tokens, copies of what follows, rows; and what it forgets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_core.engine.admission import make_sequence
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.device_cache import DeviceCache, DeviceMatch
from flare_core.engine.prefix_index import common_tokens
from flare_core.engine.request import EngineRequest
from flare_core.keys import chain_keys, token_array
from flare_core.sampling import SamplingParams

PAGE = 4
ROOT_SALT = b""


def make_cache(*, num_pages=16, num_row_snapshots=0):
    return DeviceCache(
        page_tokens=PAGE,
        num_pages=num_pages,
        max_sequences=2,
        num_row_snapshots=num_row_snapshots,
        has_rows=num_row_snapshots > 0,
    )


def computed(cache, tokens, *, with_tail=True, salt=ROOT_SALT):
    """A sequence whose tokens were all computed, registered, with its pages held."""
    config = SchedulerConfig(
        page_tokens=PAGE, num_pages=64, max_sequences=2, max_model_len=256, vocab_size=1000, set_fingerprint=bytes(32)
    )
    request = EngineRequest(
        request_id="r", token_ids=token_array(tokens).tobytes(), params=SamplingParams(max_tokens=1), salt=salt
    )
    sequence = make_sequence(request, order=0, config=config)
    sequence.pages = cache.allocate(sequence.num_pages_for(len(tokens)))
    cache.register(sequence, len(tokens), with_tail=with_tail)
    return sequence


def find(cache, sequence, tokens, **options):
    ids = token_array(tokens)
    return cache.match(sequence.root, chain_keys(sequence.root, ids, PAGE), ids.tobytes(), **options)


def test_a_repeated_prompt_hits_every_token():
    cache = make_cache()
    sequence = computed(cache, range(10))
    match = find(cache, sequence, range(10))
    assert match.pages == tuple(sequence.pages[:2])
    assert (match.num_tokens, match.source, match.num_copied) == (10, sequence.pages[2], 2)


def test_divergence_inside_a_page_costs_only_the_tokens_that_differ():
    cache = make_cache()
    sequence = computed(cache, range(12))
    match = find(cache, sequence, [*range(7), 99, 98])
    assert (match.pages, match.source, match.num_copied) == ((sequence.pages[0],), sequence.pages[1], 3)


def test_divergence_in_the_first_page_is_found_below_the_root():
    cache = make_cache()
    sequence = computed(cache, range(8))
    match = find(cache, sequence, [0, 1, 50])
    assert (match.pages, match.source, match.num_copied) == ((), sequence.pages[0], 2)


def test_without_copies_a_match_ends_with_a_whole_page():
    cache = make_cache()
    sequence = computed(cache, range(10))
    assert find(cache, sequence, range(10), allow_copy=False) == DeviceMatch(
        pages=tuple(sequence.pages[:2]), num_tokens=8
    )


def test_another_salt_shares_nothing():
    cache = make_cache()
    computed(cache, range(10))
    stranger = computed(cache, [500], salt=b"other", with_tail=False)
    assert find(cache, stranger, range(10)).num_tokens == 0


def test_an_equal_key_with_other_tokens_is_not_a_hit():
    cache = make_cache()
    sequence = computed(cache, range(8))
    keys = chain_keys(sequence.root, token_array(range(8)), PAGE)
    forged = token_array([9, 9, 9, 9, 9, 9, 9, 9]).tobytes()
    assert cache.match(sequence.root, keys, forged).num_tokens == 0


def test_the_live_last_page_is_found_up_to_its_valid_tokens_and_grows():
    cache = make_cache()
    sequence = computed(cache, range(6))
    sequence.pages = sequence.pages + cache.allocate(1)
    assert find(cache, sequence, range(8)).num_tokens == 6
    for token in (6, 7, 8):
        sequence.tokens.append(token)
    cache.register(sequence, 9, with_tail=False)
    match = find(cache, sequence, range(9))
    assert match.pages == tuple(sequence.pages[:2])
    assert len(cache.index) == 2


def test_the_first_page_registered_under_a_key_stays():
    cache = make_cache()
    first, second = computed(cache, range(8)), computed(cache, range(8))
    assert find(cache, second, range(8)).pages == tuple(first.pages)
    cache.release(reversed(second.pages))
    assert cache.pool.num_free == 14


def test_leaves_are_evicted_before_parents_and_the_longest_unused_first():
    cache = make_cache(num_pages=4)
    old, young = computed(cache, range(8)), computed(cache, range(100, 108))
    cache.release(reversed(old.pages))
    cache.release(reversed(young.pages))
    assert cache.allocate(1) == [old.pages[1]]
    assert find(cache, old, range(8)).num_tokens == 4
    assert cache.allocate(1) == [old.pages[0]]
    assert find(cache, young, range(100, 108)).num_tokens == 8
    assert cache.allocate(3) is None
    cache.pool.check()


def test_a_page_that_was_used_again_is_evicted_later():
    cache = make_cache(num_pages=2)
    first, second = computed(cache, range(4)), computed(cache, range(50, 54))
    cache.release(first.pages)
    cache.release(second.pages)
    match = find(cache, first, range(4))
    cache.acquire(match)
    cache.drop(match)
    assert cache.allocate(1) == second.pages


def test_an_idle_page_below_which_another_is_held_can_still_be_evicted():
    cache = make_cache(num_pages=4)
    parent, duplicate = computed(cache, range(4)), computed(cache, range(8))
    cache.release(parent.pages)
    assert cache.allocate(2) == [parent.pages[0], 3]
    assert find(cache, duplicate, range(8)).num_tokens == 0
    cache.release(reversed(duplicate.pages))
    assert cache.pool.num_free == 2
    cache.pool.check()


def test_clearing_leaves_held_pages_to_their_sequences():
    cache = make_cache()
    sequence = computed(cache, range(10))
    cache.index.clear()
    assert find(cache, sequence, range(10)).num_tokens == 0
    cache.register(sequence, 10, with_tail=True)
    assert find(cache, sequence, range(10)).num_tokens == 10
    cache.release(reversed(sequence.pages))
    cache.index.clear()
    assert cache.pool.num_free == cache.pool.num_pages


def test_a_model_with_rows_is_resumed_only_where_a_row_is_kept():
    cache = make_cache(num_row_snapshots=2)
    sequence = computed(cache, range(10))
    assert find(cache, sequence, range(10)).num_tokens == 0
    for at in (4, 10):
        slot = cache.take_snapshot()
        cache.register_row(sequence, at, slot)
        cache.rows.drop(slot)
    match = find(cache, sequence, range(10))
    assert (match.num_tokens, match.num_copied, match.row_slot) == (10, 2, 3)
    match = find(cache, sequence, range(9))
    assert (match.num_tokens, match.num_copied, match.row_slot) == (4, 0, 2)
    assert find(cache, sequence, range(10), allow_copy=False).num_tokens == 4


def test_the_row_used_longest_ago_makes_room_for_a_new_one():
    cache = make_cache(num_row_snapshots=1)
    sequence = computed(cache, range(8))
    first = cache.take_snapshot()
    cache.register_row(sequence, 4, first)
    assert cache.take_snapshot() is None
    cache.rows.drop(first)
    assert cache.take_snapshot() == first
    assert find(cache, sequence, range(8)).num_tokens == 0


def test_what_was_handed_to_the_store_is_known_to_the_next_prompt_until_a_store_fails():
    cache = make_cache()
    sequence = computed(cache, range(10))
    cache.mark_handed(sequence, 10)
    assert find(cache, sequence, range(10)).num_handed == 10
    assert find(cache, sequence, [*range(9), 77]).num_handed == 9
    cache.forget_handed(sequence.keys, sequence.pages[2])
    assert find(cache, sequence, range(10)).num_handed == 0


def test_a_prompt_of_a_million_tokens_is_matched_whole():
    cache = DeviceCache(page_tokens=64, num_pages=16384, max_sequences=1, num_row_snapshots=0, has_rows=False)
    tokens = np.random.default_rng(0).integers(0, 50000, 1 << 20).astype("<u4")
    keys = chain_keys(bytes(32), tokens, 64)
    parent = cache.index.root(bytes(32))
    for at, (key, page) in enumerate(zip(keys, cache.allocate(16384), strict=True)):
        parent = cache.index.insert(parent, key, page=page, tokens=tokens[at * 64 : at * 64 + 64].tobytes())
    assert cache.match(bytes(32), keys, tokens.tobytes()).num_tokens == 1 << 20


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_tokens_counts_equal_leading_ids(left, right):
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_tokens(token_array(left).tobytes(), token_array(right).tobytes()) == expected


@pytest.mark.parametrize("count", [0, 1, 5])
def test_an_allocation_larger_than_what_can_be_had_takes_nothing(count):
    cache = make_cache(num_pages=count)
    assert cache.allocate(count + 1) is None
    assert cache.num_available == count
