"""Groups that share a pool: what one has stored another restores, and no fault of the pool is more than a miss."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from flare_cache.pool.agreement import PoolState
from flare_cache.pool.messages import Commit, Find, Refused, RefusedReason
from flare_cache.pool.testing import ScriptedPool
from flare_cache.testing import GroupPlan, LocalGroup, token_geometries
from flare_core.prefix import Tier


@pytest.fixture
def start():
    groups: list[LocalGroup] = []

    def start_one(pool: ScriptedPool, *, world_size: int = 2, row_bytes: int = 0, **plan) -> LocalGroup:
        poisons: list[str] = []
        fields = {"memory_bytes": 1 << 20, **plan}
        group = LocalGroup.start(
            GroupPlan(geometries=token_geometries(world_size, row_bytes=row_bytes), pool=pool.for_rank, **fields),
            on_poison=poisons.append,
        )
        group.poisons = poisons
        groups.append(group)
        return group

    yield start_one
    for group in groups:
        assert group.poisons == []
        group.close()


def poll_until(group: LocalGroup, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, group.leader.pool.status
        for event in group.leader.store.poll():
            group._seen[event.ticket] = event
        group._wake.wait(0.01)


def on(group: LocalGroup) -> LocalGroup:
    poll_until(group, lambda: group.leader.store.pool.is_on and not group.leader.store.pool.has_pending)
    return group


def put(group: LocalGroup, tokens) -> None:
    group.store(tokens)
    poll_until(group, lambda: not group.leader.store.pool.has_pending)


def restore(group: LocalGroup, tokens):
    ticket = group.leader.store.prepare(group.query(tokens))
    if ticket is not None:
        group.wait(ticket)
    return group.restore(tokens)


@pytest.mark.parametrize("row_bytes", [0, 100])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_second_group_restores_from_the_pool_what_the_first_has_stored(start, world_size, row_bytes) -> None:
    pool = ScriptedPool()
    tokens = list(range(18))
    put(on(start(pool, world_size=world_size, row_bytes=row_bytes)), tokens)
    second = on(start(pool, world_size=world_size, row_bytes=row_bytes))
    event = restore(second, tokens)
    assert (event.num_tokens, dict(event.tokens_by_tier)) == (18, {Tier.POOL: 18})
    assert event.row_restored == bool(row_bytes)
    assert second.leader.store.statistics().hit_tokens[Tier.POOL] == 18


def test_a_prefix_comes_from_memory_and_goes_on_in_the_pool(start) -> None:
    pool = ScriptedPool()
    first, second = on(start(pool)), on(start(pool))
    put(first, list(range(8)))
    second.store(list(range(8)))
    put(first, list(range(16)))
    event = restore(second, list(range(16)))
    assert dict(event.tokens_by_tier) == {Tier.MEMORY: 8, Tier.POOL: 8}


def test_what_is_local_already_is_not_asked_for(start) -> None:
    pool = ScriptedPool()
    group = on(start(pool))
    put(group, list(range(16)))
    assert group.leader.store.prepare(group.query(list(range(16)))) is None
    assert not [one for one in pool.asked if isinstance(one, Find)]


def test_a_record_that_another_group_has_put_is_not_put_again(start) -> None:
    pool = ScriptedPool()
    put(on(start(pool)), list(range(8)))
    second = on(start(pool))
    restore(second, list(range(8)))
    num_puts = pool.num_puts
    put(second, list(range(8)))
    assert pool.num_puts == num_puts
    assert second.leader.store.pool.statistics().num_in_pool == 1


def test_one_rank_that_refuses_turns_the_pool_off_for_all_and_local_tiers_serve(start) -> None:
    pool = ScriptedPool(refuses={1: "cannot register the staging"})
    group = start(pool)
    poll_until(group, lambda: 1 in group.leader.pool.status.reasons)
    assert group.leader.pool.status.reasons[1] == "cannot register the staging"
    assert group.leader.store.prepare(group.query(list(range(8)))) is None
    group.store(list(range(8)))
    assert group.restore(list(range(8))).tokens_by_tier == {Tier.MEMORY: 8}
    pool.refuses.clear()
    on(group)
    # What was stored meanwhile has reached the pool.
    assert pool.num_puts == 2


def test_a_manager_that_comes_back_is_joined_in_a_new_session_and_pending_puts_go_on(start) -> None:
    pool = ScriptedPool()
    group = on(start(pool))
    put(group, list(range(8)))
    pool.stop()
    poll_until(group, lambda: not group.leader.store.pool.is_on)
    poll_until(group, lambda: group.leader.pool.status.state is not PoolState.ON)
    group.store(list(range(100, 108)))
    pool.start()
    on(group)
    assert group.leader.pool.status.num_sessions == 2
    assert len(pool.manifests) == 2


def test_a_manager_that_dies_under_a_restore_makes_it_a_miss(start) -> None:
    pool = ScriptedPool()
    put(on(start(pool)), list(range(12)))
    second = on(start(pool))
    ticket = second.leader.store.prepare(second.query(list(range(12))))
    second.wait(ticket)
    pool.is_up = False
    assert second.restore(list(range(12))).num_tokens == 0


def test_the_later_records_of_a_long_restore_may_wait_for_the_earlier_ones(start, monkeypatch) -> None:
    pool = ScriptedPool()
    tokens = list(range(24))
    first = on(start(pool, settings={"max_record_bytes": 1 << 20}))
    for end in (8, 16, 24):
        put(first, tokens[:end])
    second = on(start(pool))
    second.wait(second.leader.store.prepare(second.query(tokens)))
    expiries = []
    submit = second.leader.dispatcher.submit
    monkeypatch.setattr(
        second.leader.dispatcher,
        "submit",
        lambda job, **fields: expiries.append((fields["expires_at"], fields["num_bytes"])) or submit(job, **fields),
    )
    assert second.restore(tokens).num_tokens == 24
    assert len(expiries) > 2
    for (before, size), (after, _) in itertools.pairwise(expiries):
        assert after - before == pytest.approx(size / 20e6)


def test_after_a_restore_that_no_rank_could_get_the_pool_is_left_alone_twice_as_long_each_time(start) -> None:
    pool = ScriptedPool()
    put(on(start(pool)), list(range(12)))
    second = on(start(pool))
    store, tier, now = second.leader.store, second.leader.store.pool, [2.0**20 + time.monotonic()]
    store._clock = lambda: now[0]
    store._fetches._clock = store._clock
    pauses = []
    for _ in range(7):
        second.wait(store.prepare(second.query(list(range(12)))))
        pool.is_up = False
        assert second.restore(list(range(12))).num_tokens == 0
        pool.is_up = True
        assert store.prepare(second.query(list(range(12)))) is None
        pauses.append(round(tier._quiet_until - now[0], 3))
        now[0] = tier._quiet_until
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert restore(second, list(range(12))).num_tokens == 12
    assert tier._quiet_seconds == 1.0


def test_a_lookup_that_is_not_answered_ends_with_its_time_and_the_pool_is_left_alone_for_a_moment(start) -> None:
    pool = ScriptedPool()
    put(on(start(pool)), list(range(12)))
    second = on(start(pool))
    pool.silent = Find
    ticket = second.leader.store.prepare(second.query(list(range(12))))
    poll_until(second, lambda: ticket in second._seen)
    assert second.leader.store.pool.statistics().num_unanswered == 1
    assert second.leader.store.prepare(second.query(list(range(12)))) is None
    assert second.lookup(list(range(12))).num_tokens == 0


def test_a_record_that_is_gone_from_the_pool_is_a_miss_and_is_forgotten(start) -> None:
    pool = ScriptedPool()
    put(on(start(pool)), list(range(12)))
    second = on(start(pool))
    pool.shards.clear()
    assert restore(second, list(range(12))).num_tokens == 0
    assert second.lookup(list(range(12))).num_tokens == 0


def test_a_commit_that_is_refused_is_tried_again(start) -> None:
    pool = ScriptedPool()
    group = on(start(pool))
    pool.refusals.append(Refused(reason=RefusedReason.INCOMPLETE, detail="rank 1"))
    put(group, list(range(8)))
    assert len(pool.manifests) == 1


def test_a_record_whose_parent_was_dropped_takes_it_along(start) -> None:
    pool = ScriptedPool(is_up=False)
    group = start(pool)
    outbox = group.leader.store.pool._puts.outbox
    outbox.limit_bytes = 0
    group.store(list(range(8)))
    assert outbox.dropped["full"] == 1
    outbox.limit_bytes = 1 << 20
    pool.is_up = True
    poll_until(group, lambda: group.leader.store.pool.is_on)
    group.leader.store.pool._puts._reconciliation = None
    group.store(list(range(16)))
    poll_until(group, lambda: len(pool.manifests) == 2)


def test_no_record_is_committed_before_what_it_extends(start) -> None:
    pool = ScriptedPool(is_up=False)
    group = start(pool, settings={"max_record_bytes": 1 << 20})
    group.store(list(range(40)))
    pool.start()
    on(group)
    committed = [one.record for one in pool.asked if isinstance(one, Commit)]
    assert len(committed) > 2
    seen = {b""}
    for one in committed:
        assert one.parent_key in seen
        seen.add(one.key)


def test_what_the_pool_has_lost_of_a_chain_is_put_again_with_what_extends_it(start) -> None:
    pool = ScriptedPool()
    group = on(start(pool))
    put(group, list(range(8)))
    (lost,) = pool.manifests
    del pool.manifests[lost]
    pool.refusals.append(Refused(reason=RefusedReason.INCOMPLETE, detail="its parent"))
    put(group, list(range(16)))
    assert len(pool.manifests) == 2


def test_what_is_pending_while_the_pool_is_off_is_counted(start) -> None:
    group = start(ScriptedPool(is_up=False))
    group.store(list(range(12)))
    stats = group.leader.store.pool.statistics()
    assert (stats.num_pending, stats.is_on) == (1, False)
    assert stats.pending_bytes > 0


def test_a_pool_that_is_away_never_keeps_the_local_tier_from_taking_what_is_new(start) -> None:
    group = start(ScriptedPool(is_up=False), memory_bytes=100_000)
    for at in range(20):
        tokens = list(range(100 * at, 100 * at + 8))
        assert group.store(tokens).num_records == 1
        assert group.restore(tokens).num_tokens == 8
    assert 0 < group.leader.store.pool.statistics().pending_bytes <= 50_000


def test_more_than_the_budget_is_dropped_and_counted(start) -> None:
    pool = ScriptedPool(is_up=False)
    group = start(pool)
    outbox = group.leader.store.pool._puts.outbox
    outbox.limit_bytes = 40_000
    for at in range(5):
        group.store(list(range(100 * at, 100 * at + 8)))
    stats = group.leader.store.pool.statistics()
    assert stats.pending_bytes <= 40_000
    assert stats.num_pending + stats.dropped["full"] == 5
    assert stats.dropped["full"] > 0
