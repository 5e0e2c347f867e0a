"""``--pool``: wrong values name themselves, different ones stop the group, a silent manager stops nobody."""

import time

import pytest

from flare_core.testing.oracle_config import OracleConfig

PROMPT = "abcdefghijklmnop" * 20
PLAIN = OracleConfig(eos_bias=-1e9)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "pool.key"
    path.touch(mode=0o600)
    path.write_text("a5" * 32 + "\n")
    return str(path)


@pytest.mark.parametrize("disk", [True, False])
def test_a_pool_that_nobody_serves_is_said_and_local_tiers_serve(make_ranks, key_file, disk):
    options = ("--page-tokens", "16", "--pool", "selene://127.0.0.1:9", "--pool-key-file", key_file)
    ranks = make_ranks(world_size=2, config=PLAIN, options=options, disk=disk).start()
    cold, _ = ranks.cached(PROMPT)
    ranks.post("/v1/cache/reset", {"tier": "device"})
    assert ranks.cached(PROMPT) == (cold, {"disk" if disk else "memory": len(PROMPT) - 1})
    deadline = time.monotonic() + 20
    while not (pool := ranks.pool())["reasons"]:
        assert time.monotonic() < deadline
    assert "refused" in pool["reasons"]["0"]
    assert (pool["state"] in {"off", "joining"}, pool["sessions"]) == (True, 0)
    assert pool["pending"] > 0
    assert set(ranks.stop().values()) == {0}
    assert "the pool is off on every rank, local tiers serve: rank 0" in ranks.log(0)
    assert "have not reached the pool" in ranks.log(0)


def test_ranks_with_different_pools_do_not_start_and_say_which(make_ranks, key_file):
    ranks = make_ranks(world_size=2, config=PLAIN, options=("--pool-key-file", key_file))
    ranks.rank_options = {0: ("--pool", "selene://127.0.0.1:9"), 1: ("--pool", "selene://127.0.0.1:10")}
    ranks.launch()
    assert set(ranks.wait().values()) == {78}
    assert "different --pool: rank 0 has selene://127.0.0.1:9, rank 1 has selene://127.0.0.1:10" in ranks.log(0)
    assert "different --pool" in ranks.log(1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pool", "http://h:1"), "'http://h:1' is not selene://HOST:PORT (TCP) or selenes://HOST:PORT (TLS)"),
        (("--pool", "selene://h:0"), "'h:0' is not HOST or HOST:PORT"),
        (("--pool", "selene://h"), "needs --pool-key-file FILE"),
        (("--pool-key-file", __file__), "needs --pool URL"),
        (
            ("--pool", "selene://h", "--pool-key-file", __file__, "--pool-pending", "1K"),
            "--pool-pending 1 KB: a record",
        ),
    ],
)
def test_a_wrong_pool_is_named_and_nothing_starts(make_ranks, options, words):
    ranks = make_ranks(config=PLAIN, options=options)
    ranks.launch()
    assert set(ranks.wait().values()) == {2}
    assert words in ranks.log(0)
