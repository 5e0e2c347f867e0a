"""Real groups whose agents fail at one step of the agreement: never mixed, never poisoned, and on again afterwards."""

from __future__ import annotations

import time

import pytest

from flare_cache.pool import agent as agent_module
from flare_cache.pool.testing import ScriptedPool
from flare_cache.testing import GroupPlan, LocalGroup, token_geometries
from flare_core.prefix import Tier

STEPS = ["pool.connect", "pool.vote", "pool.tell", "pool.on", "pool.off", "pool.lost"]


@pytest.fixture
def group():
    pool = ScriptedPool()
    poisons: list[str] = []
    plan = GroupPlan(geometries=token_geometries(3), memory_bytes=1 << 20, pool=pool.for_rank)
    started = LocalGroup.start(plan, on_poison=poisons.append)
    yield started, pool
    assert poisons == []
    started.close()


def poll_until(group: LocalGroup, condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, group.leader.pool.status
        for event in group.leader.store.poll():
            group._seen[event.ticket] = event
        group._wake.wait(0.01)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_once_costs_a_session_and_nothing_else(group, monkeypatch, step, nth) -> None:
    started, pool = group
    store = started.leader.store
    poll_until(started, lambda: store.pool.is_on)
    left = [nth]

    def fail(name: str) -> None:
        if name == step:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(f"told to fail at {name}")

    monkeypatch.setattr(agent_module, "failpoint", fail)
    pool.stop()
    poll_until(started, lambda: not store.pool.is_on)
    pool.start()
    poll_until(started, lambda: store.pool.is_on and len(pool.connections) == 3)
    started.store(list(range(8)))
    poll_until(started, lambda: not store.pool.has_pending)
    store.reset(Tier.MEMORY)
    started.settle()
    ticket = store.prepare(started.query(list(range(8))))
    assert ticket is not None
    started.wait(ticket)
    assert started.restore(list(range(8))).tokens_by_tier == {Tier.POOL: 8}
