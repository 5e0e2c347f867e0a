"""The cache benchmark on real groups of small ranks: what it reports, what it checks, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flare_cli.bench_cache.group import open_group
from flare_cli.bench_cache.job_latency import latency_settings, measure_latency
from flare_cli.bench_cache.orders import OrderKind
from flare_cli.bench_cache.prompt import Prompt
from flare_cli.bench_cache.rank import open_rank
from flare_cli.bench_cache.run import BenchOptions, run_benchmark
from flare_cli.bench_cache.settings import GroupSettings
from flare_cli.bench_cache.throughput import Round, Throughput, measure_throughput, store_prompt
from flare_core.errors import FlareError, UsageError
from flare_core.prefix import Tier

KIB, MIB = 1 << 10, 1 << 20


def small(directory, *, world_size=2, **changed):
    values = {
        "world_size": world_size,
        "directory": str(directory),
        "bytes_per_rank": 2 * MIB,
        "page_bytes": 64 * KIB,
        "record_bytes": MIB + 512 * KIB,
        "num_threads": 2,
        "num_outstanding": 4,
    }
    return GroupSettings(**(values | changed))


def only_record_file(directory, rank):
    return min((Path(directory) / f"rank{rank}").glob("*.rec"))


def flip_last_byte(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def command(*arguments):
    return [sys.executable, "-m", "flare_cli", "bench", "cache", "--bytes", "1MiB", "--page-bytes", "64KiB", *arguments]


def test_the_command_reports_store_restore_and_raw_rates_of_each_world_size(tmp_path):
    figures = tmp_path / "figures.json"
    arguments = command("--directory", str(tmp_path), "--rounds", "2", "--json", str(figures))
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "restore/raw" in done.stdout
    report = json.loads(figures.read_bytes())
    assert [entry["world_size"] for entry in report["world_sizes"]] == [1, 2]
    for entry in report["world_sizes"]:
        assert entry["num_bytes"] == MIB * entry["world_size"]
        assert [one["restore_first"] for one in entry["rounds"]] == [True, False]
        assert min(entry[f"{what}_bytes_per_second"] for what in ("store", "restore", "raw")) > 0
    assert list(tmp_path.iterdir()) == [figures]


def test_a_prompt_longer_than_a_record_is_stored_as_several_and_restored_whole(tmp_path):
    settings = small(tmp_path)
    with open_group(settings) as group:
        measured = measure_throughput(group, settings, 2)
    assert measured.num_records == 4
    assert len(measured.rounds) == 2


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    rounds = tuple(
        Round(restore_seconds=restore, raw_seconds=raw, restore_first=True)
        for restore, raw in ((1.0, 0.9), (2.0, 1.0), (4.0, 3.9))
    )
    measured = Throughput(
        world_size=1, num_bytes=8, num_records=1, direct=True, store_seconds=2.0, rounds=rounds
    )  # fmt: skip
    assert (measured.ratio, measured.store_rate, measured.restore_rate, measured.raw_rate) == (0.9, 4.0, 4.0, 8.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_record_on_any_rank_fails_the_restore(tmp_path, rank):
    settings = small(tmp_path)
    with open_group(settings) as group:
        prompt, _, _ = store_prompt(group, settings)
        flip_last_byte(only_record_file(tmp_path, rank))
        with pytest.raises(FlareError, match="were to be restored"):
            prompt.restore()


def test_a_raw_read_brings_every_page_back(tmp_path):
    settings = small(tmp_path)
    with open_group(settings) as group:
        prompt, _, _ = store_prompt(group, settings)
        group.carry_out(OrderKind.WIPE)
        prompt.raw_read()
        group.carry_out(OrderKind.VERIFY)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_record_missing_on_any_rank_fails_the_raw_read_and_names_the_rank(tmp_path, rank):
    settings = small(tmp_path)
    with open_group(settings) as group:
        prompt, _, _ = store_prompt(group, settings)
        only_record_file(tmp_path, rank).unlink()
        with pytest.raises(FlareError, match=f"rank {rank}: missing"):
            prompt.raw_read()


def test_a_page_that_was_not_restored_is_found(tmp_path):
    rank = open_rank(small(tmp_path), 1)
    rank.fill()
    assert rank.verify() == ""
    rank.pages.page(7)[100] ^= 1
    assert rank.verify() == "page 7 of rank 1 does not hold the bytes that were stored"
    rank.wipe()
    assert rank.verify().startswith("page 0 ")
    rank.close()


def test_ranks_and_pages_hold_different_bytes(tmp_path):
    ranks = [open_rank(small(tmp_path), rank) for rank in range(2)]
    for rank in ranks:
        rank.fill()
    pages = {bytes(rank.pages.page(page)) for rank in ranks for page in range(rank.settings.num_pages)}
    assert len(pages) == 2 * ranks[0].settings.num_pages
    for rank in ranks:
        rank.close()


def test_small_jobs_are_measured_from_memory_and_from_disk(tmp_path):
    settings = latency_settings(str(tmp_path), 2)
    with open_group(settings) as group:
        latency = measure_latency(group, settings, 8)
    assert [(tier.tier, len(tier.seconds)) for tier in latency.tiers] == [(Tier.MEMORY, 8), (Tier.DISK, 8)]
    assert all(0 < tier.sent_median_seconds < tier.median_seconds <= tier.p95_seconds for tier in latency.tiers)


def test_a_part_of_the_prompt_is_restored_behind_what_the_device_has(tmp_path):
    settings = small(tmp_path, world_size=1)
    prompt = Prompt.make(settings)
    with open_group(settings) as group:
        group.carry_out(OrderKind.FILL)
        assert group.store(prompt.request()) == 4
        assert group.store(prompt.request()) == 0
        assert group.restore(prompt.query(first_page=5, end_page=20), Tier.DISK) > 0


def lose_a_peer(settings):
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    with open_group(settings) as group:
        for child in set(children.read_text().split()) - before:
            os.kill(int(child), signal.SIGKILL)
        while True:
            group.carry_out(OrderKind.WIPE)


def test_a_lost_peer_ends_the_benchmark_with_an_error(tmp_path):
    with pytest.raises(FlareError, match="link to rank 1"):
        lose_a_peer(small(tmp_path))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_bytes": 5000}, "--page-bytes 5000 is not a multiple of 4096"),
        ({"bytes_per_rank": 4 * KIB}, "--bytes 4096 is less than one page"),
        ({"bytes_per_rank": 1 << 60}, "do not fit into"),
        ({"directory": "/nowhere/at/all"}, "--directory /nowhere/at/all cannot be used"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_options_name(tmp_path, changed, message):
    options = BenchOptions(settings=small(**{"directory": tmp_path} | changed), world_sizes=(1,), num_rounds=1)
    with pytest.raises(UsageError, match=message):
        run_benchmark(options)
    assert list(tmp_path.iterdir()) == []


def test_a_terminated_benchmark_removes_what_it_wrote(tmp_path):
    arguments = command("--directory", str(tmp_path), "--world-size", "2", "--rounds", "1000")
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(tmp_path.rglob("*.rec")):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
