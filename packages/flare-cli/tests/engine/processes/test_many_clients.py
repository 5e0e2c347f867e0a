"""200 streaming clients with shared prefixes, some going away: nothing leaks, and answers equal single runs."""

import asyncio
import json
import random

import httpx
import pytest

from flare_core.testing.oracle_config import OracleConfig

NUM_CLIENTS = 200
NUM_PROMPTS = 12
MAX_TOKENS = 24


def prompt(number: int) -> str:
    return "shared prefix " * (4 + number % 3) + f"question {number % NUM_PROMPTS}"


async def run_client(client: httpx.AsyncClient, number: int, leave_after: int | None) -> str | None:
    body = {"prompt": prompt(number), "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    text, finish, seen = "", None, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            finish = event["choices"][0]["finish_reason"] or finish
            seen += 1
            if seen == leave_after:
                return None
    assert finish == "length"
    return text


@pytest.mark.parametrize(("world_size", "disk"), [(1, True), (2, True)])
def test_200_streams_leave_nothing_behind(make_ranks, world_size, disk):
    options = ("--page-tokens", "16", "--kv-memory", "400pages", "--max-sequences", "32")
    ranks = make_ranks(world_size=world_size, config=OracleConfig(), disk=disk, options=options).start()
    chance = random.Random(5)
    leaving = {number: chance.randint(1, 5) for number in chance.sample(range(NUM_CLIENTS), NUM_CLIENTS // 5)}

    async def run_all() -> list[str | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=ranks.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(run_client(client, n, leaving.get(n)) for n in range(NUM_CLIENTS)))

    texts = asyncio.run(run_all())
    snapshot = at_rest(ranks)
    engine = snapshot["engine"]
    assert engine["pages_held"] == engine["pages_quarantined"] == 0
    assert engine["pages_free"] + engine["pages_cached"] == snapshot["num_pages"] == 400
    assert sum(engine["finished"].values()) == NUM_CLIENTS
    assert engine["finished"]["length"] >= NUM_CLIENTS - len(leaving)
    assert sum(engine["hit_tokens"].values()) <= engine["lookup_tokens"]
    for number in range(NUM_CLIENTS):
        if texts[number] is not None and number < 2 * NUM_PROMPTS:
            assert texts[number] == ranks.complete(prompt(number), max_tokens=MAX_TOKENS)["choices"][0]["text"]
    assert len({(prompt(n), text) for n, text in enumerate(texts) if text is not None}) == len(
        {prompt(n) for n, text in enumerate(texts) if text is not None}
    )
    assert set(ranks.stop().values()) == {0}
    assert "Traceback" not in ranks.log(0)


def at_rest(ranks):
    """The snapshot once every request has ended and every transfer is over."""
    while True:
        snapshot = ranks.cluster()
        engine = snapshot["engine"]
        busy = engine["running"] + engine["waiting"] + engine["fetching"] + engine["pages_held"]
        if snapshot["cache"] is not None:
            busy += snapshot["cache"]["num_jobs_outstanding"] + snapshot["cache"]["num_jobs_waiting"]
        if not busy:
            return snapshot
