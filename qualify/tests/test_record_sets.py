"""The set of records that a group keeps: after a disagreement, under a small limit, over restarts (A16, A17)."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flare_cache.inspect import list_records
from flare_qualify.client import ServerError, complete, get_json, post_json
from flare_qualify.distance import total_variation

WORLD_SIZES = [2, 3]
ANSWER_TOKENS = 24


def prompt(number: int, num_tokens: int = 150) -> list[int]:
    """Token ids of a prompt that shares nothing with another number's."""
    return [3 + (number * 37 + position * (number + 1)) % 250 for position in range(num_tokens)]


def ask(group, number):
    """The greedy answer to prompt ``number`` with its top log-probabilities."""
    return complete(group.url, prompt(number), max_tokens=ANSWER_TOKENS, logprobs=5)


def wait_for_stores(group) -> None:
    """End the group as an operator would: it flushes its stores and exits 0 on every rank."""
    codes = group.stop()
    assert codes == dict.fromkeys(codes, 0)


def records_of(group, rank):
    return {record.name: record for record in list_records(group.record_directory(rank)).records}


def file_names(group, rank):
    return {file.name for file in group.record_files(rank)}


def subtree(records, top):
    """Names of ``top`` and all that descends from it."""
    found = {top}
    by_key = {record.header.identity.key: name for name, record in records.items()}
    for record in sorted(records.values(), key=lambda one: one.depth):
        if by_key.get(record.header.identity.parent_key) in found:
            found.add(record.name)
    return found


def cut_last_section(path, record) -> None:
    """Truncate the file before its row, or before its tail where it has no row."""
    layout = record.header.layout
    os.truncate(path, layout.tail_end if record.has_row else layout.pages_end)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_that_disagree_keep_exactly_what_all_hold(make_group, model, world_size):
    group = make_group(model, world_size)
    group.start()
    before = [ask(group, number) for number in range(3)]
    wait_for_stores(group)
    assert group.same_record_names()
    records = records_of(group, 0)
    deleted = min(name for name, record in records.items() if record.depth == 0)
    lost = subtree(records, deleted)
    # A compaction may have dropped rows and tails that a descendant makes superfluous: take a record that has one.
    shortened = min(name for name in set(records) - lost if records[name].has_row or records[name].has_tail)
    (group.record_directory(1) / deleted).unlink()
    last = world_size - 1
    cut_last_section(group.record_directory(last) / shortened, records_of(group, last)[shortened])

    group.start()
    for rank in range(world_size):
        assert file_names(group, rank) == set(records) - lost
        kept = records_of(group, rank)[shortened]
        if records[shortened].has_row:
            assert not kept.has_row
        else:
            assert not kept.has_tail
    after = [ask(group, number) for number in range(3)]
    assert [answer.text for answer in after] == [answer.text for answer in before]
    assert all(total_variation(*pair) < 1e-5 for pair in zip(logprobs(before), logprobs(after), strict=True))
    restored = sorted(answer.cached_tokens["disk"] for answer in after)
    assert restored[0] == 0
    # A prompt whose only row is gone restores nothing; one whose tail is gone restores its whole pages.
    assert restored[1] > 0 or records[shortened].has_row
    assert restored[2] == len(prompt(0)) - 1
    wait_for_stores(group)
    assert group.same_record_names()


def logprobs(answers):
    return [answer.logprobs for answer in answers]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_small_limit_holds_on_every_rank_after_every_request(make_group, model, world_size):
    group = make_group(model, world_size)
    group.start()
    ask(group, 0)
    wait_for_stores(group)
    sizes = [sum(file.num_bytes for file in group.record_files(rank)) for rank in range(world_size)]
    limit = int(2.5 * max(sizes))

    small = make_group(model, world_size, "--prefix-cache-disk-limit", str(limit))
    small.start()
    evicted = 0
    seen: set[str] = set()
    for number in range(6):
        ask(small, number)
        small.wait_stored()
        names = file_names(small, 0)
        for rank in range(world_size):
            assert file_names(small, rank) == names
            assert_sizes_follow_the_geometry(small, rank)
            assert sum(file.num_bytes for file in small.record_files(rank)) <= limit
        evicted += len(seen - names)
        seen |= names
    assert evicted > 0
    post_json(small.url, "/v1/cache/reset", {"tier": "device"})
    assert ask(small, 5).cached_tokens["disk"] == len(prompt(5)) - 1
    wait_for_stores(small)


def assert_sizes_follow_the_geometry(group, rank) -> None:
    for record in records_of(group, rank).values():
        layout = record.header.layout
        expected = layout.row_end if record.has_row else layout.tail_end if record.has_tail else layout.pages_end
        assert record.size == expected


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_restart_of_every_rank_changes_nothing_but_the_tier(make_group, model, world_size):
    group = make_group(model, world_size)
    group.start()
    cold = ask(group, 0)
    device = ask(group, 0)
    group.wait_stored()
    post_json(group.url, "/v1/cache/reset", {"tier": "device"})
    disk = ask(group, 0)
    wait_for_stores(group)
    group.start()
    restarted = ask(group, 0)
    assert cold.total_cached == 0
    expected = len(prompt(0)) - 1
    assert device.cached_tokens["device"] == expected
    assert disk.cached_tokens["disk"] == expected
    assert restarted.cached_tokens["disk"] == expected
    for answer in (device, disk, restarted):
        assert answer.text == cold.text
        assert total_variation(answer.logprobs, cold.logprobs) == 0.0
    wait_for_stores(group)
    assert group.same_record_names()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_rank_killed_during_a_restore_fails_the_request_and_ends_the_group(make_group, model, world_size):
    group = make_group(model, world_size)
    group.start()
    expected = ask(group, 0)
    wait_for_stores(group)
    group.start()
    # Stopped, the peer leaves the restore under way for as long as the test needs to see it, and to kill it then.
    group.processes[world_size - 1].send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, group, 0)
        wait_until_fetching(group)
        group.kill(world_size - 1)
        with pytest.raises(ServerError) as caught:
            asked.result()
    assert caught.value.status == 503
    codes = group.wait()
    assert codes[0] == 70
    group.start()
    again = ask(group, 0)
    assert again.text == expected.text
    assert again.cached_tokens["disk"] == len(prompt(0)) - 1
    wait_for_stores(group)


def wait_until_fetching(group) -> None:
    deadline = time.monotonic() + 4  # a silent rank is given up after 5 s
    while get_json(group.url, "/v1/cluster")["engine"]["fetching"] == 0:
        assert time.monotonic() < deadline, "no restore began"
