"""Two groups of real ranks over one manager: what the first has computed the second restores, bit for bit."""

import json
import subprocess
import sys
import time

import pytest

from flare_core.testing.oracle_config import OracleConfig
from flare_transport import Security

PROMPT = "abcdefghijklmnop" * 30
PLAIN = OracleConfig(eos_bias=-1e9)
ROWS = OracleConfig(row_bytes=64, eos_bias=-1e9)


@pytest.fixture
def new_group(make_ranks, tmp_path):
    salt = tmp_path / "salt.key"
    salt.touch(mode=0o600)
    salt.write_text("b6" * 32 + "\n")

    def make(manager, *, config=PLAIN, options=(), **fields):
        shared = ("--page-tokens", "16", *manager.options, "--prefix-cache-salt-key-file", str(salt))
        ranks = make_ranks(world_size=2, config=config, options=(*shared, *options), **fields).start()
        wait_for(ranks, lambda pool: pool["state"] == "on")
        return ranks

    return make


def flare(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "flare_cli", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def wait_for(ranks, condition, seconds: float = 20.0) -> dict:
    deadline = time.monotonic() + seconds
    while not condition(pool := ranks.pool()):
        assert time.monotonic() < deadline, (pool, ranks.log(0))
        time.sleep(0.02)
    return pool


def flush(ranks) -> dict:
    return wait_for(ranks, lambda pool: pool["state"] == "on" and not pool["pending"] and not pool["backlog"])


@pytest.mark.parametrize("security", [Security.TLS, Security.PLAINTEXT])
@pytest.mark.parametrize("config", [PLAIN, ROWS], ids=["plain", "rows"])
def test_a_second_group_restores_what_the_first_has_computed(new_manager, new_group, security, config):
    manager = new_manager(security)
    first = new_group(manager, config=config)
    cold, tiers = first.cached(PROMPT)
    assert tiers == {}
    pool = flush(first)
    assert pool["records_put"] > 0
    assert set(first.pool("?records=1")["records"].values()) == {"in-pool"}
    assert pool["dropped"] == {}
    second = new_group(manager, config=config)
    assert second.cached(PROMPT) == (cold, {"pool": len(PROMPT) - 1})
    assert set(second.stop().values()) == {0}
    assert set(first.stop().values()) == {0}


def test_after_all_disks_were_cleared_the_pool_restores_and_the_local_tiers_are_filled_again(new_manager, new_group):
    manager = new_manager()
    ranks = new_group(manager)
    cold, _ = ranks.cached(PROMPT)
    assert set(ranks.stop().values()) == {0}
    assert "have not reached the pool" not in ranks.log(0)
    for rank in range(2):
        for path in ranks.directory(rank).glob("*.rec"):
            path.unlink()
    ranks.start()
    wait_for(ranks, lambda pool: pool["state"] == "on")
    assert ranks.cached(PROMPT) == (cold, {"pool": len(PROMPT) - 1})
    ranks.post("/v1/cache/reset", {"tier": "device"})
    assert ranks.cached(PROMPT) == (cold, {"disk": len(PROMPT) - 1})
    # What came from the pool is not put there again.
    assert flush(ranks)["records_put"] == 0


def test_a_group_without_disk_or_memory_tier_puts_from_its_pending_budget(new_manager, new_group):
    manager = new_manager()
    cold, _ = (first := new_group(manager, disk=False)).cached(PROMPT)
    flush(first)
    assert new_group(manager, disk=False).cached(PROMPT) == (cold, {"pool": len(PROMPT) - 1})


def test_a_manager_that_was_started_anew_is_joined_again_and_serves_what_it_had(new_manager, new_group):
    manager = new_manager()
    ranks = new_group(manager)
    cold, _ = ranks.cached(PROMPT)
    flush(ranks)
    manager.stop()
    wait_for(ranks, lambda pool: pool["state"] != "on")
    other, _ = ranks.cached("zyxw" * 60)
    assert ranks.pool()["pending"] > 0
    manager.start()
    pool = flush(ranks)
    assert pool["sessions"] == 2
    second = new_group(manager)
    assert second.cached(PROMPT) == (cold, {"pool": len(PROMPT) - 1})
    assert second.cached("zyxw" * 60) == (other, {"pool": 239})


def test_an_operator_waits_for_a_flush_and_sees_what_the_pool_has_of_each_record(new_manager, new_group):
    ranks = new_group(new_manager())
    ranks.cached(PROMPT)
    code, text = flare("pool", "flush", "--url", ranks.url)
    assert code == 0
    assert "none is pending" in text
    code, text = flare("records", "ls", str(ranks.directory(1)), "--json", "--url", ranks.url)
    assert {json.loads(line)["pool"] for line in text.splitlines()} == {"in-pool"}
    code, text = flare("status", "--url", ranks.url)
    assert f"pool      {ranks.options[3]} on for" in text
    assert code == 0


def test_another_salt_key_shares_nothing(new_manager, new_group, tmp_path):
    manager = new_manager()
    flush(first := new_group(manager))
    first.cached(PROMPT)
    flush(first)
    salt = tmp_path / "other.salt"
    salt.touch(mode=0o600)
    salt.write_text("c7" * 32 + "\n")
    second = new_group(manager, options=("--prefix-cache-salt-key-file", str(salt)))
    assert second.cached(PROMPT)[1] == {}


def test_a_wrong_key_keeps_the_pool_off_and_says_so(new_manager, make_ranks, tmp_path):
    manager = new_manager()
    key = tmp_path / "wrong.key"
    key.touch(mode=0o600)
    key.write_text("00" * 32 + "\n")
    options = ("--pool", manager.url, "--pool-key-file", str(key))
    ranks = make_ranks(world_size=2, config=PLAIN, options=options).start()
    pool = wait_for(ranks, lambda pool: pool["reasons"])
    assert "key" in pool["reasons"]["0"]
    assert ranks.complete("abc")
