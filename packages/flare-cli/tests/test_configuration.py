"""Settings: precedence, origins, units, launchers, and one clear message for each mistake."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flare_cli.__main__ import main
from flare_cli.command_tree import flare
from flare_cli.config import HostPort, KvMemory, decode_config, encode_config, is_loopback
from flare_cli.resolve import resolve
from flare_cli.settings import RUN_SETTINGS
from flare_cli.units import format_size, parse_duration, parse_size
from flare_core.errors import UsageError


def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(tmp_path):
    file = tmp_path / "flare.toml"
    file.write_text('port = 1\nhost = "::1"\npage-tokens = 32\nmax_sequences = 5\n')
    resolved = resolve({"port": "3"}, {"FLARE_PORT": "2", "FLARE_HOST": "127.0.0.2"}, file=file)
    config, origins = resolved.config, resolved.origins
    assert (config.port, origins["port"]) == (3, "flag --port")
    assert (config.host, origins["host"]) == ("127.0.0.2", "env FLARE_HOST")
    assert (config.page_tokens, origins["page_tokens"]) == (32, f"file {file}")
    assert config.max_sequences == 5
    assert (config.threads, origins["threads"]) == (None, "default")


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ({}, ["127.0.0.1"]),
        ({"world_size": "2", "rendezvous": "10.0.0.1:7000"}, ["127.0.0.1", "10.0.0.1"]),
        ({"world_size": "2", "rendezvous": "127.0.0.1:7000"}, ["127.0.0.1"]),
        ({"world_size": "2", "rendezvous": "10.0.0.1:7000", "host": "::1"}, ["::1"]),
        ({"host": "127.0.0.1,10.0.0.5"}, ["127.0.0.1", "10.0.0.5"]),
    ],
)
def test_http_is_served_where_asked_or_on_loopback_and_where_the_ranks_meet(tmp_path, flags, hosts):
    key = tmp_path / "cluster.key"
    key.write_text("00" * 32)
    assert resolve(flags | {"key_file": str(key)}, {}).config.hosts == hosts


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("200G", 200 * 10**9), ("400M", 4 * 10**8), ("64GiB", 64 << 30), ("1.5k", 1500), ("12", 12), ("30gb", 3 * 10**10)],
)
def test_sizes_are_decimal_or_binary(text, num_bytes):
    assert parse_size(text) == num_bytes


@given(st.integers(0, 1 << 60))
def test_a_shown_size_is_readable_and_near(num_bytes):
    assert abs(parse_size(format_size(num_bytes)) - num_bytes) <= num_bytes * 0.001


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("5s", 5), ("2m", 120), ("1h", 3600), ("0.25", 0.25)])
def test_durations_have_units(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "G", "-1", "5 x", "1e9", "0x10", "\u0661G"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError):
        parse_size(text)


def test_a_configuration_survives_the_way_to_the_worker():
    flags = {"kv_memory": "7pages", "prefix_cache_disk": "/a/{rank}", "prefix_cache_disk_limit": "5G"}
    config = resolve(flags, {"FLARE_THREADS": "2"}).config
    assert decode_config(encode_config(config)) == config
    assert config.kv_memory == KvMemory(num_pages=7)
    assert config.prefix_cache_disk == Path("/a/0")


def test_torchrun_places_a_rank_beside_its_own_store(tmp_path):
    key = tmp_path / "key"
    key.touch()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    flags = {"key_file": str(key)}
    resolved = resolve(flags, variables)
    assert (resolved.config.rank, resolved.config.world_size) == (1, 2)
    assert resolved.config.rendezvous == HostPort("10.0.0.1", 29500)
    assert resolved.origins["rank"] == "env RANK"
    shared = resolve(flags, variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert shared.config.rendezvous == HostPort("10.0.0.1", 29501)
    assert resolve(flags | {"rank": "0"}, variables).config.rank == 0


def test_slurm_and_leader_worker_set_place_a_rank(tmp_path):
    key = tmp_path / "key"
    key.touch()
    flags = {"key_file": str(key)}
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1", "SLURM_STEP_ID": "0"}
    config = resolve(flags, slurm).config
    assert (config.rank, config.world_size, config.rendezvous) == (2, 3, HostPort("10.1.1.1", 7000))
    shell_of_an_allocation = {name: value for name, value in slurm.items() if name != "SLURM_STEP_ID"}
    assert resolve({}, shell_of_an_allocation).config.world_size == 1
    lws = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "llm-0.llm"}
    config = resolve(flags, lws).config
    assert (config.rank, config.world_size, config.rendezvous) == (1, 2, HostPort("llm-0.llm", 7000))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rank", "2", "--world-size", "2"], ["--rank 2", "0 to 1"]),
        (["--world-size", "2"], ["--rendezvous"]),
        (["--world-size", "0"], ["--world-size 0", "at least 1"]),
        (["--world-size", "2", "--rendezvous", "h:1"], ["--key-file", "flare key"]),
        (["--rendezvous", "nowhere"], ["--rendezvous", "HOST:PORT"]),
        (["--port", "x"], ["--port", "'x'"]),
        (["--page-tokens", "48"], ["--page-tokens 48", "power of two"]),
        (["--prefix-cache-disk-limit", "5G"], ["--prefix-cache-disk DIR"]),
        (["--key-file", "/nowhere/k"], ["/nowhere/k", "no such file"]),
        (["--prefix-cache-memory", "lots"], ["--prefix-cache-memory", "'lots'", "64GiB"]),
        (["--device", "tpu"], ["--device tpu"]),
        (["--config", "/nowhere.toml"], ["/nowhere.toml"]),
        (["--nothing"], ["--nothing"]),
        (["/nowhere/model"], ["/nowhere/model"]),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["config", *arguments])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    for word in words:
        assert word in text


def test_a_misspelt_setting_in_the_file_is_named_with_the_nearest(tmp_path):
    file = tmp_path / "flare.toml"
    file.write_text("page-token = 32\n")
    with pytest.raises(UsageError, match="did you mean page-tokens"):
        resolve({}, {}, file=file)
    file.write_text("port = [1]\n")
    with pytest.raises(UsageError, match="port: a list"):
        resolve({}, {}, file=file)


def test_config_shows_everything_before_it_says_what_run_would_refuse(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "vocab_size": 64}')
    with pytest.raises(SystemExit) as ended:
        main(["config", str(tmp_path), "--world-size", "2"])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert "on 2 ranks" in shown.out
    assert "--rendezvous" in shown.err


def test_config_shows_values_origins_and_the_uneven_split(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(
        '{"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}'
    )
    key = tmp_path / "key"
    key.touch()
    monkeypatch.setenv("FLARE_PAGE_TOKNES", "3")
    monkeypatch.setenv("COLUMNS", "200")
    arguments = [str(tmp_path), "--world-size", "2", "--rendezvous", "h:1", "--key-file", str(key)]
    result = CliRunner().invoke(flare, ["config", *arguments])
    assert result.exit_code == 0
    assert "flag --world-size" in result.output
    assert "0-1 (2)" in result.output
    assert "0-5 (6)" in result.output
    assert "FLARE_PAGE_TOKNES is set and is no setting" in result.output


def test_every_setting_has_a_flag_and_help():
    result = CliRunner().invoke(flare, ["run", "--help"])
    assert result.exit_code == 0
    for setting in RUN_SETTINGS:
        assert setting.flag in result.output
        assert setting.text


def test_loopback_is_told_from_other_addresses():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"))
