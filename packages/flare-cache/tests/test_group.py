"""Whole groups: real directories, threads and links, at world sizes 1 to 3."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import threading
from dataclasses import dataclass, replace

import pytest

from flare_cache.jobs import Job
from flare_cache.outcomes import ShardedLimits
from flare_cache.testing import GroupPlan, LocalGroup, token_geometries
from flare_core.errors import ConfigurationMismatch, Poisoned, UsageError
from flare_core.prefix import Tier

PROMPT = list(range(100, 130))


def started(plan: GroupPlan, **options) -> LocalGroup:
    return LocalGroup.start(plan, **options)


@pytest.fixture(params=[1, 2, 3])
def world_size(request) -> int:
    return request.param


def plan_for(tmp_path, world_size: int, *, row_bytes: int = 0, dims=None, max_sections: int | None = None, **fields):
    geometries = token_geometries(world_size, row_bytes=row_bytes, dims=dims)
    settings = dict(fields.pop("settings", {}))
    if max_sections is not None:
        biggest = max(geometry.page_bytes for geometry in geometries)
        settings["max_record_bytes"] = (1 << 20) + geometries[0].row_stride + max_sections * biggest
    return GroupPlan(geometries=geometries, root=tmp_path, settings=settings, **fields)


def assert_same_files(group: LocalGroup) -> None:
    group.settle()
    names = [set(rank.file_sizes()) for rank in group.ranks]
    assert all(one == names[0] for one in names)
    charged = group.leader.store.statistics().tiers[Tier.DISK].charged_bytes
    assert charged == max(sum(rank.file_sizes().values()) for rank in group.ranks)


def test_a_prompt_is_restored_to_its_last_token_also_after_a_restart(tmp_path, world_size):
    plan = plan_for(tmp_path, world_size, max_sections=3)
    group = started(plan)
    assert group.store(PROMPT).num_records == 3
    assert group.store(PROMPT) is None
    event = group.restore(PROMPT)
    assert (event.num_tokens, event.tokens_by_tier) == (30, {Tier.DISK: 30})
    assert_same_files(group)
    group.close()
    group = started(plan)
    assert group.leader.report.num_kept == 3
    assert group.restore([*PROMPT[:22], 7, 7, 7]).num_tokens == 22
    assert group.leader.store.statistics().hit_tokens == {Tier.DISK: 22}
    group.close()


def test_a_model_with_rows_restores_page_tail_and_row(tmp_path, world_size):
    plan = plan_for(tmp_path, world_size, row_bytes=5000)
    group = started(plan)
    group.store(PROMPT[:16])
    group.store(PROMPT)
    group.close()
    group = started(plan)
    event = group.restore([*PROMPT, 1, 2])
    assert (event.num_tokens, event.row_restored) == (30, True)
    event = group.restore([*PROMPT[:20], 1, 2])
    assert (event.num_tokens, event.row_restored) == (16, True)
    group.close()


def test_ranks_with_unequal_pages_share_a_limit_by_the_largest(tmp_path):
    plan = plan_for(tmp_path, 2, dims=[512, 256], disk_limits={0: 40_000, 1: 100_000})
    group = started(plan)
    assert group.leader.report.disk_limit_bytes == 40_000
    for first in range(0, 200, 10):
        group.store(list(range(first, first + 8)))
        assert_same_files(group)
        assert all(sum(rank.file_sizes().values()) <= 40_000 for rank in group.ranks)
    sizes = [sum(rank.file_sizes().values()) for rank in group.ranks]
    assert sizes[0] > sizes[1]
    assert group.leader.store.statistics().records_evicted[Tier.DISK] > 0
    assert group.restore(list(range(190, 198))).num_tokens == 8
    assert group.restore(list(range(8))).num_tokens == 0
    group.close()


def test_ranks_that_disagree_keep_what_all_hold_and_recompute_the_rest(tmp_path, world_size):
    plan = plan_for(tmp_path, world_size, row_bytes=5000)
    group = started(plan)
    group.store(PROMPT[:12])
    group.store(PROMPT[:24])
    group.store(PROMPT)
    last = group.ranks[-1].directory.path
    first = group.ranks[0].directory.path
    deepest = group.lookup(PROMPT).segments[-1].record_key.hex()
    middle = group.lookup(PROMPT[:24]).segments[-1].record_key.hex()
    group.close()
    (last / f"{deepest}.rec").unlink()
    os.truncate(first / f"{middle}.rec", (first / f"{middle}.rec").stat().st_size - 8192)
    group = started(plan)
    assert group.leader.report.num_kept == 2
    event = group.restore(PROMPT)
    assert (event.num_tokens, event.row_restored) == (12, True)
    assert_same_files(group)
    group.close()


def test_a_damaged_record_ends_the_prefix_and_leaves_every_rank_with_its_subtree(tmp_path, world_size):
    plan = plan_for(tmp_path, world_size, max_sections=2)
    group = started(plan)
    group.store(PROMPT)
    segments = group.lookup(PROMPT).segments
    path = group.ranks[-1].directory.path / f"{segments[1].record_key.hex()}.rec"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    event = group.restore(PROMPT)
    assert event.num_tokens == 8
    assert event.tokens_by_tier == {Tier.DISK: 8}
    assert group.lookup(PROMPT).num_tokens == 8
    assert_same_files(group)
    assert [len(rank.file_sizes()) for rank in group.ranks] == [1] * world_size
    assert group.leader.store.statistics().records_failed == {Tier.DISK: 1}
    group.store(PROMPT)
    assert group.restore(PROMPT).num_tokens == 30
    group.close()


@dataclass
class FailingShelf:
    """A disk shelf that refuses stores while ``refuses`` is set, and waits before fetches while ``holds`` is."""

    shelf: object
    refuses: threading.Event
    may_fetch: threading.Event
    is_fetching: threading.Event

    def store(self, job: Job, memory):
        if self.refuses.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.shelf.store(job, memory)

    def fetch(self, job: Job, memory):
        self.is_fetching.set()
        self.may_fetch.wait(30)
        return self.shelf.fetch(job, memory)

    def truncate(self, job: Job) -> int:
        return self.shelf.truncate(job)

    def unlink(self, job: Job) -> int:
        return self.shelf.unlink(job)


class Shelves:
    """Failing shelves by rank, and how to steer them."""

    def __init__(self) -> None:
        self.by_rank: dict[int, FailingShelf] = {}

    def __call__(self, rank: int, shelf) -> FailingShelf:
        may_fetch = threading.Event()
        may_fetch.set()
        self.by_rank[rank] = FailingShelf(shelf, threading.Event(), may_fetch, threading.Event())
        return self.by_rank[rank]


def test_a_store_that_one_rank_refuses_is_undone_on_the_others(tmp_path, world_size, monkeypatch):
    monkeypatch.setattr("flare_cache.tier_health.RETRY_SECONDS", 0.0)
    shelves = Shelves()
    group = started(plan_for(tmp_path, world_size, max_sections=2, change_shelf=shelves))
    shelves.by_rank[world_size - 1].refuses.set()
    event = group.store(PROMPT)
    assert event.num_records == 0
    assert event.failure.startswith(f"rank {world_size - 1}: ENOSPC")
    assert_same_files(group)
    assert all(rank.file_sizes() == {} for rank in group.ranks)
    statistics = group.leader.store.statistics()
    assert statistics.stores_dropped == {"failed": 1, "parent": 3}
    assert statistics.job_times[world_size - 1]["store"].failures == {"ENOSPC": 1}
    shelves.by_rank[world_size - 1].refuses.clear()
    assert group.store(PROMPT).num_records == 4
    assert group.restore(PROMPT).num_tokens == 30
    group.close()


def test_memory_is_a_tier_of_its_own_that_can_be_reset(tmp_path, world_size):
    group = started(plan_for(tmp_path, world_size, memory_bytes=1 << 20))
    assert group.store(PROMPT).num_records == 2
    assert group.restore(PROMPT).tokens_by_tier == {Tier.MEMORY: 30}
    group.leader.store.reset(Tier.MEMORY)
    group.settle()
    assert group.leader.store.statistics().tiers[Tier.MEMORY].charged_bytes == 0
    assert group.restore(PROMPT).tokens_by_tier == {Tier.DISK: 30}
    assert group.store(PROMPT).num_records == 1
    assert group.restore(PROMPT).tokens_by_tier == {Tier.MEMORY: 30}
    assert group.leader.store.reset(Tier.MEMORY)
    assert not group.leader.store.reset(Tier.POOL)
    group.close()


def test_memory_alone_needs_no_directory(world_size):
    plan = GroupPlan(geometries=token_geometries(world_size), memory_bytes=200_000)
    group = started(plan)
    assert list(group.leader.report.lines()) == ["agreed memory limit: 200000 bytes a rank"]
    for first in range(0, 300, 30):
        group.store(list(range(first, first + 30)))
    assert group.restore(list(range(270, 300))).num_tokens == 30
    assert group.leader.store.statistics().tiers[Tier.MEMORY].charged_bytes <= 200_000
    group.close()


def test_a_tail_that_a_longer_prompt_begins_with_is_compacted_on_every_rank(tmp_path, world_size):
    group = started(plan_for(tmp_path, world_size))
    group.store(PROMPT[:10])
    (before,) = group.ranks[-1].file_sizes().values()
    group.store(PROMPT)
    assert_same_files(group)
    assert before - min(group.ranks[-1].file_sizes().values()) == 4096
    assert group.restore(PROMPT[:10]).num_tokens == 10
    group.close()


@pytest.mark.parametrize("row_bytes", [0, 100])
def test_what_one_rank_lost_of_a_record_is_stored_again_on_all(tmp_path, world_size, row_bytes):
    plan = plan_for(tmp_path, world_size, row_bytes=row_bytes)
    group = started(plan)
    group.store(PROMPT)
    whole = [rank.file_sizes() for rank in group.ranks]
    ((name, _),) = whole[-1].items()
    group.close()
    os.truncate(tmp_path / f"rank{world_size - 1}" / name, whole[-1][name] - 4096 - plan.geometries[0].row_stride)
    group = started(plan)
    assert all(rank.file_sizes()[name] < sizes[name] for rank, sizes in zip(group.ranks, whole, strict=True))
    assert group.lookup(PROMPT).num_tokens == (0 if row_bytes else 28)
    assert group.store(PROMPT).num_records == 1
    assert [rank.file_sizes() for rank in group.ranks] == whole
    assert group.restore(PROMPT).num_tokens == 30
    assert_same_files(group)
    group.close()


def test_a_fetch_waits_for_the_step_that_touches_its_pages(tmp_path, world_size):
    group = started(plan_for(tmp_path, world_size))
    group.store(PROMPT)
    ticket, pages = group.begin_restore(PROMPT, after_step=2)
    assert group.leader.store.poll() == []
    assert not any(bytes(rank.pages.page(pages[0])).strip(b"\0") for rank in group.ranks)
    assert group.finish_step() == 2
    event = group.wait(ticket)
    assert event.num_tokens == 30
    for rank in group.ranks:
        gate = group.leader.dispatcher if rank.peer is None else rank.peer.service
        gate.wait_for_jobs(event.jobs)
    group.close()


def test_a_cancelled_restore_gives_up_what_has_not_begun(tmp_path):
    limits = ShardedLimits(max_outstanding=1)
    shelves = Shelves()
    group = started(plan_for(tmp_path, 2, max_sections=2, limits=limits, change_shelf=shelves))
    group.store(PROMPT)
    shelves.by_rank[1].may_fetch.clear()
    ticket, _ = group.begin_restore(PROMPT)
    group.leader.store.cancel(ticket)
    shelves.by_rank[1].may_fetch.set()
    event = group.wait(ticket)
    assert event.num_tokens == 8
    assert group.restore(PROMPT).num_tokens == 30
    group.leader.store.cancel(ticket)
    group.close()


def test_a_peer_lost_during_a_restore_poisons_rank_zero_and_ends_the_peer(tmp_path):
    poisons: queue.SimpleQueue[str] = queue.SimpleQueue()
    shelves = Shelves()
    group = started(plan_for(tmp_path, 3, change_shelf=shelves), on_poison=poisons.put)
    group.store(PROMPT)
    shelves.by_rank[2].may_fetch.clear()
    ticket, _ = group.begin_restore(PROMPT)
    assert shelves.by_rank[2].is_fetching.wait(10)
    group.ranks[2].peer.service._link.fail("pulled out")
    with pytest.raises(Poisoned, match="link to rank 2"):
        group.wait(ticket)
    with pytest.raises(Poisoned):
        group.leader.store.poll()
    assert "link to rank 2" in poisons.get(timeout=10)
    assert poisons.empty()
    for rank in group.ranks[1:]:
        assert rank.ended.wait(10)
        assert rank.end.is_loss
    assert group.ranks[1].end.is_drained
    assert not group.ranks[2].end.is_drained
    with pytest.raises(Poisoned):
        group.ranks[2].peer.service.wait_for_jobs([99])
    shelves.by_rank[2].may_fetch.set()
    group.close()


def test_a_peer_that_ends_in_order_while_rank_zero_serves_poisons_too(tmp_path):
    poisons: queue.SimpleQueue[str] = queue.SimpleQueue()
    group = started(plan_for(tmp_path, 2), on_poison=poisons.put)
    assert group.ranks[1].peer.service.close()
    with pytest.raises(Poisoned):
        group.store(PROMPT)
    # The watchdog is told from a thread of its own: the engine may hear of it first.
    assert "link to rank 1" in poisons.get(timeout=10)
    group.close()


def test_heartbeats_carry_steps_and_jobs(tmp_path):
    group = started(plan_for(tmp_path, 2))
    group.store(PROMPT)
    service, dispatcher = group.ranks[1].peer.service, group.leader.dispatcher
    while dispatcher.peer_progress.get(1) is None or dispatcher.peer_progress[1].num_jobs_finished == 0:
        threading.Event().wait(0.02)
    assert dispatcher.peer_progress[1].last_step == 1
    while service.leader_progress.last_step == 0:
        threading.Event().wait(0.02)
    assert (dispatcher.num_waiting, dispatcher.num_outstanding) == (0, 0)
    group.close()


def test_settings_that_differ_fail_every_rank(tmp_path):
    plan = plan_for(tmp_path, 3, rank_settings={2: {"min_tail_tokens": 8}})
    with pytest.raises(ConfigurationMismatch, match="prefix_cache_min_tail: rank 0 has 0, rank 2 has 8") as caught:
        started(plan)
    assert str(caught.value.__notes__[0]).count("ConfigurationMismatch") == 2
    assert started(replace(plan, rank_settings={})).leader.close(5)


def test_a_rank_without_a_disk_store_fails_every_rank(tmp_path):
    with pytest.raises(ConfigurationMismatch, match="prefix_cache_disk: rank 0 has given, rank 1 has absent"):
        started(plan_for(tmp_path, 2, rank_settings={1: {"has_disk": False}}))


def test_an_emptied_directory_stops_start_up_until_the_loss_is_accepted(tmp_path):
    plan = plan_for(tmp_path, 2)
    group = started(plan)
    group.store(PROMPT)
    group.close()
    shutil.rmtree(tmp_path / "rank1")
    with pytest.raises(UsageError, match=r"directory of rank 1 .*/rank1\) is empty"):
        started(plan)
    group = started(replace(plan, settings={**plan.settings, "accept_loss": True}))
    assert_same_files(group)
    assert group.restore(PROMPT).num_tokens == 0
    group.close()


def test_a_directory_of_another_rank_is_named_on_every_rank(tmp_path):
    plan = plan_for(tmp_path, 2)
    group = started(plan)
    group.close()
    (tmp_path / "rank0").rename(tmp_path / "other")
    (tmp_path / "rank1").rename(tmp_path / "rank0")
    (tmp_path / "other").rename(tmp_path / "rank1")
    with pytest.raises(UsageError, match="rank is 1, this run has 0") as caught:
        started(plan)
    assert "rank is 0, this run has 1" in caught.value.__notes__[0] or "rank is 1" in caught.value.__notes__[0]
