"""``flare records`` and ``flare status`` on what a real server has left, and while it runs."""

import json
import subprocess
import sys

import pytest

from flare_core.testing.oracle_config import OracleConfig

PROMPT = "abcdefghijklmnop" * 20


def flare(*arguments):
    command = [sys.executable, "-m", "flare_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def listed(directory):
    done = flare("records", "ls", "--json", directory)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def ranks(make_ranks):
    return make_ranks(config=OracleConfig(eos_bias=-1e9)).start()


def test_records_can_be_listed_shown_verified_and_removed(ranks):
    ranks.complete(PROMPT)
    ranks.stop()
    directory = ranks.directory(0)
    records = listed(directory)
    assert {f"{record['key']}.rec" for record in records} == ranks.record_names(0)
    assert records[0]["first_token_ids"][:3] == [ord(c) + 3 for c in "abc"]
    assert records[0]["key"] in flare("records", "show", directory, records[0]["key"][:12]).stdout
    assert flare("records", "verify", directory).returncode == 0

    path = directory / f"{records[0]['key']}.rec"
    data = bytearray(path.read_bytes())
    data[8192 + 100] ^= 1
    path.write_bytes(data)
    bad = flare("records", "verify", directory)
    assert bad.returncode == 1
    assert records[0]["key"] in bad.stdout

    removed = flare("records", "rm", "--yes", directory, records[0]["key"][:12])
    assert removed.returncode == 0
    assert listed(directory) == []
    assert flare("records", "show", directory, "00").returncode == 2


def test_a_record_is_listed_without_the_tail_that_it_gave_up(ranks):
    ranks.complete(PROMPT + "tail")
    longer = PROMPT + "tail" + ranks.complete(PROMPT + "tail", max_tokens=70)["choices"][0]["text"]
    ranks.complete(longer)
    ranks.stop()
    ends = [(record["end"], record["tail_tokens"]) for record in listed(ranks.directory(0))]
    assert all(end % 64 == 0 or tail for end, tail in ends)


def test_records_of_a_running_server_are_not_removed(ranks):
    ranks.complete(PROMPT)
    assert "in use" in flare("records", "ls", ranks.directory(0)).stdout
    refused = flare("records", "rm", "--yes", ranks.directory(0), "0")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_status_shows_the_cluster_and_its_absence(ranks):
    ranks.complete(PROMPT)
    shown = flare("status", "--url", ranks.url)
    assert shown.returncode == 0
    assert "disk" in shown.stdout
    snapshot = json.loads(flare("status", "--url", ranks.url, "--json").stdout)
    assert snapshot["state"] == "ready"
    assert snapshot["engine"]["finished"] == {"length": 1}
    ranks.stop()
    gone = flare("status", "--url", ranks.url)
    assert gone.returncode == 1
    assert "no flare server answers" in gone.stderr
