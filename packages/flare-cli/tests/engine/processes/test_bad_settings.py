"""Mistakes of users and disagreements between ranks: one clear message each, no traceback, the right exit code."""

import secrets
import socket

import pytest

from flare_core.testing.oracle_config import OracleConfig

PROMPT = "abcdefghijklmnop" * 20


def ends_with(ranks, codes, *words):
    assert ranks.wait() == codes
    for rank in ranks.processes:
        log = ranks.log(rank)
        assert "Traceback" not in log
        for word in words:
            assert word in log, (rank, word, log)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--page-tokens", "32"), ("--page-tokens", "rank 0 has 64", "rank 1 has 32")),
        (("--max-sequences", "7"), ("--max-sequences", "rank 1 has 7")),
        (("--prefix-cache-memory", "5M"), ("--prefix-cache-memory", "rank 0 has absent", "rank 1 has given")),
        (("--speculative-config", '{"method": "ngram"}'), ("--speculative-config", "rank 0 has None", "ngram")),
    ],
)
def test_a_setting_that_differs_is_named_on_every_rank(make_ranks, options, words):
    ranks = make_ranks(world_size=2, rank_options={1: options})
    ranks.launch()
    ends_with(ranks, {0: 78, 1: 78}, *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--speculative-config", "{"), ("--speculative-config", "for example")),
        (("--speculative-config", '{"method": "dream"}'), ("--speculative-config", "method")),
        (("--speculative-config", '{"method": "ngram"}'), ("--speculative-config", "test model", "leave it out")),
        (("--speculative-config", '{"method": "ngram"}', "--plan-lead", "1"), ("--plan-lead 1", "leave it out")),
    ],
    ids=["no JSON", "no such method", "a model that drafts nothing", "planning ahead"],
)
def test_speculation_that_cannot_be_is_refused(make_ranks, options, words):
    ranks = make_ranks(options=options)
    ranks.launch()
    ends_with(ranks, {0: 2}, *words)


def test_another_model_on_one_rank_is_refused_on_every_rank(make_ranks, tmp_path):
    other = make_ranks(config=OracleConfig(seed=9)).model
    other = other.rename(tmp_path / "other")
    ranks = make_ranks(world_size=3, config=OracleConfig())
    ranks.launch([0, 1])
    ranks.model, mine = other, ranks.model
    ranks.launch([2])
    ranks.model = mine
    ends_with(ranks, {0: 78, 1: 78, 2: 78}, "model")


def test_another_salt_key_on_one_rank_is_refused(make_ranks, tmp_path):
    for name in ("a", "b"):
        file = tmp_path / name
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32) + "\n")
    options = {rank: ("--prefix-cache-salt-key-file", str(tmp_path / name)) for rank, name in enumerate("ab")}
    ranks = make_ranks(world_size=2, rank_options=options)
    ranks.launch()
    ends_with(ranks, {0: 78, 1: 78}, "salt")


def test_a_peer_that_never_comes_is_named(make_ranks):
    patience = {0: ("--rendezvous-timeout", "3s"), 2: ("--rendezvous-timeout", "60s")}
    ranks = make_ranks(world_size=3, rank_options=patience)
    ranks.launch([0, 2])
    assert ranks.wait() == {0: 75, 2: 75}
    assert "rank 1 did not come" in ranks.log(0)
    assert "gave up waiting" in ranks.log(2)
    assert "Traceback" not in ranks.log(0) + ranks.log(2)


def test_a_second_process_with_the_same_rank_is_turned_away(make_ranks):
    ranks = make_ranks(world_size=3)
    ranks.launch([0, 1])
    while "rank 1" not in ranks.log(0):
        pass
    second = ranks.launch_one(1, log="second.log")
    assert second.wait(30) == 78
    text = (ranks.root / "second.log").read_text()
    assert "rank 1" in text
    assert "Traceback" not in text
    ranks.processes = {rank: ranks.processes[rank] for rank in (0, 1)}
    ranks.launch([2])
    ranks.wait_ready()
    assert set(ranks.stop().values()) == {0}


def test_a_wrong_cluster_key_is_turned_away_and_the_group_still_forms(make_ranks, tmp_path):
    wrong = tmp_path / "wrong.key"
    wrong.touch(mode=0o600)
    wrong.write_text(secrets.token_hex(32) + "\n")
    ranks = make_ranks(world_size=2)
    ranks.launch([0])
    stranger = ranks.launch_one(1, "--key-file", str(wrong), log="wrong.log")
    assert stranger.wait(30) == 78
    assert "key" in (ranks.root / "wrong.log").read_text()
    ranks.processes = {0: ranks.processes[0]}
    ranks.launch([1])
    ranks.wait_ready()
    assert set(ranks.stop().values()) == {0}


def test_a_key_file_open_to_others_is_refused_with_the_remedy(make_ranks, tmp_path):
    key = tmp_path / "open.key"
    key.write_text(secrets.token_hex(32) + "\n")
    key.chmod(0o644)
    ranks = make_ranks(options=("--key-file", str(key)))
    ranks.launch()
    ends_with(ranks, {0: 2}, "chmod 600")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--prefix-cache-disk-limit", "1K", "a record of one page takes"),
        ("--prefix-cache-disk-limit", "0", "a record of one page takes"),
        ("--prefix-cache-memory", "1K", "a record of one page takes"),
        ("--prefix-cache-memory", "1000T", "of this machine"),
        ("--kv-memory", "1pages", "give more"),
        ("--kv-memory", "1000T", "give less"),
    ],
)
def test_a_size_that_cannot_work_is_refused_on_every_rank(make_ranks, option, value, words):
    ranks = make_ranks(world_size=2, rank_options={1: (option, value)})
    if option == "--prefix-cache-memory":
        ranks.rank_options[0] = (option, "10M")
    ranks.launch()
    ends_with(ranks, {0: 2, 1: 2}, option, words)


def test_a_port_in_use_is_named(make_ranks):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ranks = make_ranks(port=taken.getsockname()[1], disk=False)
        ranks.launch()
        ends_with(ranks, {0: 2}, f"--port {taken.getsockname()[1]}")


def test_a_model_that_is_none_is_named(make_ranks, tmp_path):
    for content, word in (
        (None, "config.json"),
        ("{", "not JSON"),
        ('{"model_type": "t5"}', "tokenizer.json is missing"),
    ):
        directory = tmp_path / "nothing"
        directory.mkdir(exist_ok=True)
        if content is not None:
            (directory / "config.json").write_text(content)
        ranks = make_ranks(model=directory, disk=False)
        ranks.launch()
        ends_with(ranks, {0: 2}, word)


def test_a_directory_of_another_rank_or_world_size_is_refused(make_ranks):
    ranks = make_ranks(world_size=2).start()
    ranks.complete(PROMPT)
    ranks.stop()
    for rank in (0, 1):
        ranks.rank_options[rank] = ("--prefix-cache-disk", str(ranks.directory(1 - rank)))
    ranks.launch()
    assert ranks.wait() == {0: 2, 1: 2}
    assert "rank" in ranks.log(0)
    assert "Traceback" not in ranks.log(0) + ranks.log(1)
    ranks.processes.clear()
    alone = make_ranks(options=("--prefix-cache-disk", str(ranks.directory(0))))
    alone.launch()
    assert alone.wait() == {0: 2}
    assert "world size" in alone.log(0).replace("world_size", "world size")


def test_a_directory_that_cannot_be_used_is_named(make_ranks, tmp_path):
    (tmp_path / "file").touch()
    ranks = make_ranks(world_size=2, rank_options={1: ("--prefix-cache-disk", str(tmp_path / "file"))})
    ranks.launch()
    assert ranks.wait() == {0: 2, 1: 2}
    assert str(tmp_path / "file") in ranks.log(0)
    assert str(tmp_path / "file") in ranks.log(1)
    assert "Traceback" not in ranks.log(0) + ranks.log(1)
