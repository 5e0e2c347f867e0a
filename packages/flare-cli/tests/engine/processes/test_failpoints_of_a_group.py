"""Failpoints in real groups of ranks: they act where they say, in the process that was told, and nowhere else."""

import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from flare_core.testing.oracle_config import OracleConfig
from flare_transport.failpoint import FAILPOINTS

PROMPT = "abcdefghijklmnop" * 30
PLAIN = OracleConfig(eos_bias=-1e9)
PAGES = ("--page-tokens", "16")


def start_sabotaged(ranks, orders):
    """Start the group with ``orders`` by rank, as each rank's own environment."""
    for rank in range(ranks.world_size):
        ranks.environment = {"FLARE_FAILPOINT": orders[rank]} if rank in orders else {}
        ranks.launch_one(rank)
    ranks.environment = {}


def wait_until(is_so, seconds=30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_so():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come to that")


def state_of(pid):
    """The letter that /proc gives: T while stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("order", ["store.rename:kill", "store.link:crash", "store.link"])
def test_an_order_that_cannot_be_is_refused_before_anything_starts(make_ranks, order):
    ranks = make_ranks(config=PLAIN, environment={"FLARE_FAILPOINT": order})
    ranks.launch()
    assert ranks.wait() == {0: 2}
    assert "FLARE_FAILPOINT" in ranks.log(0)
    assert "known are" in ranks.log(0) or "write NAME:ACTION" in ranks.log(0)


def test_every_process_of_a_rank_says_loudly_that_it_is_armed(make_ranks):
    ranks = make_ranks(world_size=2, config=PLAIN)
    start_sabotaged(ranks, {0: "store.link:kill@1000", 1: "store.link:kill@1000"})
    ranks.wait_ready()
    assert ranks.log(0).count("WILL FAIL ON PURPOSE") == 2
    assert ranks.log(1).count("WILL FAIL ON PURPOSE") == 1
    assert "no setting of flare" not in ranks.log(0)


def test_the_processes_that_the_table_names_come_to_every_failpoint(make_ranks, new_manager):
    manager = new_manager()
    options = (*PAGES, "--prefix-cache-durability", "power", "--prefix-cache-disk-limit", "400K", *manager.options)
    ranks = make_ranks(world_size=2, config=PLAIN, options=options)
    points = [point for point in FAILPOINTS if point.where != "manager"]
    every = ";".join(f"{point.name}:pause=1ms" for point in points)
    start_sabotaged(ranks, {0: every, 1: f"{every};store.header:error=EIO@9"})
    ranks.wait_ready()
    wait_until(lambda: ranks.pool()["state"] == "on")
    for number in range(14):
        prompt = chr(ord("a") + number) * 100
        ranks.complete(prompt)
        ranks.complete(prompt + "xyz" * 20)  # whose pages begin with the tail of the first: that is cut
        if number % 4 == 0:
            ranks.post("/v1/cache/reset", {"tier": "device"})
            ranks.complete(prompt)
    wait_until(lambda: ranks.pool()["records_put"] > 0)
    manager.stop()
    wait_until(lambda: ranks.pool()["state"] != "on")
    assert set(ranks.stop().values()) == {0}
    reached = [set(re.findall(r"failpoint ([a-z.-]+): pause", ranks.log(rank))) for rank in range(2)]
    assert reached[0] == {point.name for point in points if point.where != "peer"}
    assert reached[1] == {point.name for point in points if point.where != "rank 0"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["store.link", "store.ack"])
def test_a_rank_killed_in_a_store_leaves_no_record_on_some_ranks_only(make_ranks, rank, point):
    ranks = make_ranks(world_size=2, config=PLAIN, options=PAGES)
    start_sabotaged(ranks, {rank: f"{point}:kill"})
    ranks.wait_ready()
    # Stored when its prefill ends: the request may be answered first, or lose its engine.
    assert ranks.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8}).status_code in {200, 503}
    codes = ranks.wait()
    assert codes[0] == 70
    assert codes[1] == (-signal.SIGKILL if rank == 1 else 70)
    assert f"failpoint {point}: kill" in ranks.log(rank)
    ranks.processes.clear()
    ranks.start()
    restored, _ = ranks.cached(PROMPT)
    assert ranks.cached(PROMPT) == (restored, {"device": len(PROMPT) - 1})
    ranks.post("/v1/cache/reset", {"tier": "device"})
    assert ranks.cached(PROMPT) == (restored, {"disk": len(PROMPT) - 1})
    ranks.stop()
    assert ranks.record_names(0) == ranks.record_names(1) != set()


def test_a_store_that_fails_on_one_rank_is_undone_on_the_other(make_ranks):
    ranks = make_ranks(world_size=2, config=PLAIN, options=PAGES)
    start_sabotaged(ranks, {1: "store.header:error=EIO", 0: "undo.begin:pause=1ms"})
    ranks.wait_ready()
    ranks.complete(PROMPT)
    wait_until(lambda: "failpoint undo.begin" in ranks.log(0))
    wait_until(lambda: ranks.record_names(0) == ranks.record_names(1))
    metrics = httpx.get(f"{ranks.url}/metrics", timeout=10).text
    assert 'flare_cache_job_failures_total{op="store",rank="1",reason="EIO"} 1.0' in metrics
    assert set(ranks.stop().values()) == {0}


def test_a_peer_stopped_before_a_step_ends_the_group(make_ranks):
    ranks = make_ranks(world_size=2, config=PLAIN, options=PAGES)
    start_sabotaged(ranks, {1: "step.launch:stop@3"})
    ranks.wait_ready()
    began = time.monotonic()
    response = ranks.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True})
    assert response.status_code == 503
    assert ranks.processes[0].wait(30) == 70
    assert time.monotonic() - began < 20
    assert state_of(ranks.processes[1].pid) == "T"
    os.kill(ranks.processes[1].pid, signal.SIGCONT)
    assert ranks.processes[1].wait(30) == 70


@pytest.mark.parametrize(
    ("rank", "order", "codes"),
    [
        (1, "rendezvous.proof:kill", {1: {-signal.SIGKILL}, 0: {75}}),
        (0, "rendezvous.accept:exit", {0: {70}, 1: {75}}),
        (1, "record-link.connect:kill", {1: {-signal.SIGKILL}, 0: {70}}),
        (0, "join.propose:kill", {0: {70}, 1: {70}}),
        (1, "join.apply:kill", {1: {-signal.SIGKILL}, 0: {70}}),
    ],
)
def test_a_rank_that_dies_while_the_group_starts_ends_it(make_ranks, rank, order, codes):
    ranks = make_ranks(world_size=2, config=PLAIN, options=("--rendezvous-timeout", "3s"))
    start_sabotaged(ranks, {rank: order})
    found = ranks.wait(60)
    assert f"failpoint {order.partition(':')[0]}" in ranks.log(rank)
    assert all(found[each] in codes[each] for each in codes), (found, ranks.log(0), ranks.log(1))
    ranks.processes.clear()
    ranks.start()
    assert set(ranks.stop().values()) == {0}


def test_a_pause_delays_and_changes_nothing(make_ranks):
    ranks = make_ranks(world_size=2, config=PLAIN, options=PAGES)
    start_sabotaged(ranks, {1: "store.write:pause=300ms;fetch.read:pause=300ms"})
    ranks.wait_ready()
    cold = ranks.complete(PROMPT)["choices"][0]["text"]
    wait_until(lambda: ranks.cluster()["cache"]["num_jobs_outstanding"] == 0 and ranks.record_names(1))
    assert ranks.post("/v1/cache/reset", {"tier": "device"}).status_code == 200
    assert ranks.cached(PROMPT) == (cold, {"disk": len(PROMPT) - 1})
    assert "failpoint fetch.read: pause=300ms" in ranks.log(1)
    assert set(ranks.stop().values()) == {0}
