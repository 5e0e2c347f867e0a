"""Whole groups of ranks: what is stored comes back, signals drain, and a lost rank ends everything clearly."""

import contextlib
import json
import os
import signal
import threading
import time

import httpx
import pytest

from flare_cli.model_store import DEFAULT_MODEL
from flare_core.testing.oracle_config import OracleConfig

PROMPT = "abcdefghijklmnop" * 30
ROWS = OracleConfig(row_bytes=64, eos_bias=-1e9)
PLAIN = OracleConfig(eos_bias=-1e9)
LONG = {"max_tokens": 100_000, "temperature": 0, "ignore_eos": True, "stream": True}


def events_of(response: httpx.Response):
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


@pytest.mark.parametrize(
    ("world_size", "config"), [(1, PLAIN), (2, ROWS), (3, PLAIN), (3, ROWS)], ids=["1", "2-rows", "3", "3-rows"]
)
def test_a_restart_of_all_ranks_restores(make_ranks, world_size, config):
    ranks = make_ranks(world_size=world_size, config=config, options=("--page-tokens", "16")).start()
    cold, tiers = ranks.cached(PROMPT)
    assert tiers == {}
    device, tiers = ranks.cached(PROMPT)
    assert (device, tiers) == (cold, {"device": len(PROMPT) - 1})
    assert ranks.post("/v1/cache/reset", {"tier": "device"}).status_code == 200
    disk, tiers = ranks.cached(PROMPT)
    assert (disk, tiers) == (cold, {"disk": len(PROMPT) - 1})
    assert set(ranks.stop().values()) == {0}
    names = ranks.record_names(0)
    assert names
    assert all(ranks.record_names(rank) == names for rank in range(world_size))
    ranks.start()
    restarted, tiers = ranks.cached(PROMPT)
    assert (restarted, tiers) == (cold, {"disk": len(PROMPT) - 1})
    assert all(ranks.record_names(rank) >= names for rank in range(world_size))


def test_without_a_model_every_rank_takes_the_default_one(make_ranks, tmp_path):
    directory = tmp_path / "cache" / "flare" / "models" / DEFAULT_MODEL.name
    ranks = make_ranks(world_size=2, config=PLAIN, environment={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    directory.parent.mkdir(parents=True)
    ranks.model.rename(directory)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text("{}")
    (directory / "model.safetensors").touch()
    ranks.model = None
    assert ranks.start().complete(PROMPT)["model"] == DEFAULT_MODEL.name


def test_start_up_says_how_records_are_read_and_what_they_survive(make_ranks):
    options = ("--prefix-cache-disk-transport", "buffered", "--prefix-cache-durability", "power")
    ranks = make_ranks(config=PLAIN, options=options).start()
    while "address" not in ranks.log(0):
        pass
    assert "buffered I/O, records survive a power cut" in ranks.log(0)


def test_a_memory_tier_answers_before_the_disk(make_ranks):
    ranks = make_ranks(world_size=2, config=PLAIN, options=("--prefix-cache-memory", "10M")).start()
    cold, _ = ranks.cached(PROMPT)
    ranks.post("/v1/cache/reset", {"tier": "device"})
    assert ranks.cached(PROMPT) == (cold, {"memory": len(PROMPT) - 1})
    ranks.post("/v1/cache/reset", {"tier": "device"})
    ranks.post("/v1/cache/reset", {"tier": "memory"})
    assert ranks.cached(PROMPT) == (cold, {"disk": len(PROMPT) - 1})


def test_a_plan_lead_changes_no_text(make_ranks):
    texts = set()
    for lead in ("0", "1"):
        ranks = make_ranks(config=PLAIN, options=("--plan-lead", lead), disk=False).start()
        texts.add(tuple(ranks.cached(PROMPT + str(i), max_tokens=30)[0] for i in range(3)))
        ranks.stop()
    assert len(texts) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_and_takes_no_more(make_ranks, number):
    ranks = make_ranks(world_size=2, config=PLAIN).start()
    body = {"prompt": "x", **LONG, "max_tokens": 5000}  # on a busy machine, too, it outlasts the questions below
    with (
        httpx.Client(base_url=ranks.url, timeout=60) as client,
        httpx.stream("POST", f"{ranks.url}/v1/completions", json=body, timeout=60) as response,
    ):
        client.get("/health")
        stream = events_of(response)
        next(stream)
        ranks.processes[0].send_signal(number)
        refused = None
        while refused is None or refused.status_code == 200:
            refused = client.post("/v1/completions", json={"prompt": "y", "max_tokens": 1})
        assert refused.status_code == 503
        assert client.get("/health").json()["status"] == "draining"
        rest = list(stream)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["choices"][0]["finish_reason"] == "length"
    assert set(ranks.wait().values()) == {0}


def test_a_signal_to_a_peer_drains_the_group(make_ranks):
    ranks = make_ranks(world_size=2, config=PLAIN).start()
    ranks.complete("x")
    ranks.processes[1].send_signal(signal.SIGTERM)
    assert set(ranks.wait().values()) == {0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("reached", ["rank 1 joining the group", "rank 1 ready", "waiting for 1 more ranks"])
def test_a_signal_before_anything_is_served_ends_in_order(make_ranks, number, reached):
    ranks = make_ranks(world_size=2)
    started = {"rank 1 joining the group": [1], "rank 1 ready": [0, 1], "waiting for 1 more ranks": [0]}[reached]
    ranks.launch(started)
    words = "rank 1 of 2 is ready" if reached == "rank 1 ready" else reached
    while words not in ranks.log(started[-1]):
        pass
    for rank in started:
        os.killpg(ranks.processes[rank].pid, number)
    assert set(ranks.wait().values()) == {0}
    assert not any("Traceback" in ranks.log(rank) for rank in started)


@pytest.mark.parametrize("reached", ["joined", "rank 1 of 2 is ready"])
def test_stopping_rank_zero_alone_before_anything_is_served_ends_its_peer_in_order(make_ranks, reached):
    ranks = make_ranks(world_size=2)
    ranks.launch()
    while reached not in ranks.log(1):
        pass
    os.killpg(ranks.processes[0].pid, signal.SIGTERM)
    assert set(ranks.wait().values()) == {0}
    assert not any("Traceback" in ranks.log(rank) for rank in (0, 1))


def test_requests_that_outlast_the_drain_are_given_up(make_ranks):
    ranks = make_ranks(config=PLAIN, options=("--drain-timeout", "200ms")).start()
    with httpx.stream("POST", f"{ranks.url}/v1/completions", json={"prompt": "x", **LONG}, timeout=60) as response:
        stream = events_of(response)
        next(stream)
        ranks.processes[0].send_signal(signal.SIGTERM)
        rest = list(stream)
    assert "error" in rest[-1]
    assert set(ranks.wait().values()) == {0}


@pytest.mark.parametrize("victim", ["peer", "worker"])
def test_a_lost_rank_ends_streams_unfinished_and_the_group(make_ranks, victim):
    # Prompts take long, so that one request is still waiting for its first token.
    config = OracleConfig(eos_bias=-1e9, prefill_cost_seconds=0.002)
    ranks = make_ranks(world_size=2, config=config).start()
    answers: dict[str, httpx.Response] = {}

    def wait_in_vain() -> None:
        answers["waiting"] = ranks.post("/v1/completions", {"prompt": "y" * 8000, "max_tokens": 1})

    with httpx.stream("POST", f"{ranks.url}/v1/completions", json={"prompt": "x", **LONG}, timeout=60) as response:
        stream = events_of(response)
        next(stream)
        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        while ranks.cluster()["engine"]["running"] < 2:
            pass
        os.kill(ranks.processes[1].pid if victim == "peer" else ranks.worker_pid(), signal.SIGKILL)
        rest = list(stream)
    waiting.join()
    assert all(event["choices"][0]["finish_reason"] is None for event in rest if "choices" in event)
    assert "[DONE]" not in rest
    assert answers["waiting"].status_code == 503
    codes = ranks.wait()
    assert codes[0] == 70
    assert codes[1] == (-signal.SIGKILL if victim == "peer" else 70)
    assert "Traceback" not in ranks.log(0) + ranks.log(1)


def test_a_lost_api_process_takes_its_worker_and_the_peers_along(make_ranks):
    ranks = make_ranks(world_size=2, config=PLAIN).start()
    worker = ranks.worker_pid()
    with httpx.stream("POST", f"{ranks.url}/v1/completions", json={"prompt": "x", **LONG}, timeout=60) as response:
        next(events_of(response))  # the engine is in the middle of work
        ranks.processes[0].kill()
    assert ranks.wait()[1] == 70
    with contextlib.suppress(ProcessLookupError):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            os.kill(worker, 0)
            time.sleep(0.01)
        raise AssertionError("the worker outlived its parent")


def test_health_says_what_was_lost_before_the_end(make_ranks):
    ranks = make_ranks(config=PLAIN).start()
    os.kill(ranks.worker_pid(), signal.SIGKILL)
    seen: set[str] = set()
    with contextlib.suppress(httpx.HTTPError):
        while True:
            seen.add(httpx.get(f"{ranks.url}/health", timeout=5).json()["status"])
    assert "lost" in seen
    assert ranks.wait() == {0: 70}
