"""Disks that fill up, fail or stop answering under a real group: requests are answered, and operators can see why."""

import contextlib
import os
import resource
import signal
import time

import httpx
import pytest

from flare_core.testing.oracle_config import OracleConfig

PLAIN = OracleConfig(eos_bias=-1e9)
PAGES = ("--page-tokens", "16")


def prompt(number):
    """Prompts that share no token at their beginning."""
    return chr(ord("a") + number) * 160


def metric(ranks, line):
    text = httpx.get(f"{ranks.url}/metrics", timeout=10).text
    found = [float(each.rpartition(" ")[2]) for each in text.splitlines() if each.startswith(line + " ")]
    return found[0] if found else None


def disk_tier(ranks):
    (tier,) = ranks.cluster()["cache"]["tiers"]
    return tier


def settled(ranks):
    """Wait until nothing is on its way in or out; the disk tier then."""
    while True:
        cache = ranks.cluster()["cache"]
        if not cache["num_jobs_waiting"] + cache["num_jobs_outstanding"] + cache["tiers"][0]["num_stores_pending"]:
            return cache["tiers"][0]
        time.sleep(0.01)


def until_the_end(ranks, line):
    """Values of a metric for as long as the server answers."""
    seen = set()
    with contextlib.suppress(httpx.HTTPError):
        while True:
            seen.add(metric(ranks, line))
            time.sleep(0.02)
    return seen


def start_with(make_ranks, orders, **options):
    """A group whose ranks have these failpoints."""
    ranks = make_ranks(world_size=2, config=PLAIN, **({"options": PAGES} | options))
    for rank in range(2):
        ranks.environment = {"FLARE_FAILPOINT": orders[rank]} if rank in orders else {}
        ranks.launch_one(rank)
    ranks.environment = {}
    ranks.wait_ready()
    return ranks


def test_a_full_disk_pauses_stores_and_space_that_comes_back_resumes_them(make_ranks):
    ranks = make_ranks(world_size=2, config=PLAIN, options=PAGES).start()
    unlimited = resource.prlimit(ranks.processes[1].pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    cold = ranks.cached(prompt(1))
    assert settled(ranks)["stores_stopped"].startswith("paused, as rank 1 had no place: EFBIG")
    assert ranks.cached(prompt(1))[0] == cold[0]
    assert metric(ranks, 'flare_cache_stores_stopped{tier="disk"}') == 1
    assert metric(ranks, 'flare_cache_dropped_stores_total{reason="failed"}') == 1
    assert ranks.record_names(0) == ranks.record_names(1) == set()
    resource.prlimit(ranks.processes[1].pid, resource.RLIMIT_FSIZE, unlimited)
    number = 2
    while settled(ranks)["stores_stopped"]:
        ranks.complete(prompt(number))
        number += 1
    assert metric(ranks, 'flare_cache_stores_stopped{tier="disk"}') == 0
    assert set(ranks.stop().values()) == {0}
    assert ranks.record_names(0) == ranks.record_names(1) != set()


def test_a_rank_whose_disk_cannot_be_read_ends_restores_for_the_group(make_ranks):
    ranks = start_with(make_ranks, {1: "fetch.read:error=EIO@1+"})
    cold = {number: ranks.cached(prompt(number))[0] for number in range(4)}
    settled(ranks)
    assert ranks.post("/v1/cache/reset", {"tier": "device"}).status_code == 200
    for number in range(4):
        assert ranks.cached(prompt(number)) == (cold[number], {})
    # A restore may read several records at once: there are at most as many failures as records.
    assert disk_tier(ranks)["reads_stopped"].startswith("rank 1 failed to read 3 times within 60 s")
    assert metric(ranks, 'flare_cache_reads_stopped{tier="disk"}') == 1
    assert metric(ranks, 'flare_cache_job_failures_total{op="fetch",rank="1",reason="read-error"}') >= 3
    assert ranks.log(0).count("not read any more") == 1
    assert set(ranks.stop().values()) == {0}
    assert ranks.record_names(0) == ranks.record_names(1)


@pytest.mark.parametrize("point", ["store.fsync", "store.fsync-directory"])
def test_a_failed_fsync_ends_stores_for_the_group_and_leaves_no_record(make_ranks, point):
    options = (*PAGES, "--prefix-cache-durability", "power")
    ranks = start_with(make_ranks, {1: f"{point}:error=EIO"}, options=options)
    cold = ranks.complete(prompt(1))["choices"][0]["text"]
    settled(ranks)
    ranks.complete(prompt(2))
    assert settled(ranks)["stores_stopped"] == "rank 1: stores-stopped: fsync failed: Input/output error"
    ranks.complete(prompt(3))
    settled(ranks)
    assert metric(ranks, 'flare_cache_dropped_stores_total{reason="stopped"}') >= 1
    assert ranks.cached(prompt(1)) == (cold, {"device": len(prompt(1)) - 1})
    assert set(ranks.stop().values()) == {0}
    assert ranks.record_names(0) == ranks.record_names(1) == set()


def test_a_part_that_cannot_be_removed_stays_unseen_and_goes_at_the_next_start(make_ranks):
    # Rank 1 fails after rank 0 has written; rank 0 cannot unlink what it wrote.
    orders = {0: "unlink.remove:error=EIO", 1: "store.link:error=EIO"}
    ranks = start_with(make_ranks, orders)
    cold = ranks.complete(prompt(1))["choices"][0]["text"]
    settled(ranks)
    while "could not be removed: rank 0: EIO" not in ranks.log(0):
        time.sleep(0.01)
    assert metric(ranks, 'flare_cache_job_failures_total{op="unlink",rank="0",reason="EIO"}') == 1
    assert ranks.record_names(1) < ranks.record_names(0)
    ranks.post("/v1/cache/reset", {"tier": "device"})
    assert ranks.cached(prompt(1))[0] == cold
    assert set(ranks.stop().values()) == {0}
    ranks.start()
    assert ranks.cached(prompt(1))[0] == cold
    assert set(ranks.stop().values()) == {0}
    assert ranks.record_names(0) == ranks.record_names(1)


def test_transfers_that_never_end_keep_their_memory_until_the_process_does(make_ranks):
    ranks = start_with(make_ranks, {1: "fetch.deliver:hang"})
    ranks.complete(prompt(1))
    settled(ranks)
    ranks.post("/v1/cache/reset", {"tier": "device"})
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"{ranks.url}/v1/completions", json={"prompt": prompt(1), "max_tokens": 4}, timeout=1)
    os.killpg(ranks.processes[0].pid, signal.SIGKILL)
    assert ranks.processes[1].wait(20) == 70
    assert "transfers did not end within 0.4 s" in ranks.log(1)


def test_a_transfer_that_is_never_answered_poisons_with_its_reason(make_ranks):
    ranks = start_with(make_ranks, {1: "store.write:hang"})
    ranks.complete(prompt(1))
    assert until_the_end(ranks, 'flare_poisoned_total{reason="deadline"}') == {0, 1}
    assert ranks.wait() == {0: 70, 1: 70}
    assert "deadline: rank 1 did not answer store job 1" in ranks.log(0)


def test_a_dispatcher_that_is_stuck_ends_the_group(make_ranks):
    ranks = start_with(make_ranks, {0: "store.report:hang"})
    ranks.complete(prompt(1))
    assert ranks.wait(40) == {0: 70, 1: 70}
    assert "no heartbeat for 5 s" in ranks.log(1)


def test_a_lost_rank_is_counted_and_named_by_a_stable_reason(make_ranks):
    ranks = make_ranks(world_size=2, config=PLAIN).start()
    reasons = ("link-lost", "silent", "queue-full", "deadline", "protocol", "undo-failed", "device-fault", "internal")
    assert {metric(ranks, f'flare_poisoned_total{{reason="{reason}"}}') for reason in reasons} == {0}
    ranks.processes[1].kill()
    assert 1 in until_the_end(ranks, 'flare_poisoned_total{reason="link-lost"}')
    assert ranks.wait()[0] == 70
    assert "the engine is lost: link-lost: " in ranks.log(0)


def test_a_memory_tier_that_is_not_there_is_not_reset(make_ranks):
    ranks = make_ranks(config=PLAIN).start()
    response = ranks.post("/v1/cache/reset", {"tier": "memory"})
    assert response.status_code == 409
    assert "there is no memory tier; give --prefix-cache-memory" in response.json()["error"]["message"]
