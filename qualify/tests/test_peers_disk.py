"""The comparison with other systems' disk paths: its order, its figures, and what it says when a peer fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flare_cli.bench_cache.settings import GroupSettings
from flare_core.errors import FlareError, UsageError
from flare_qualify.peers_disk import FLARE, RAW, Comparison, compare, joined, peer_side, rotated


def test_the_order_of_the_sides_rotates_by_one_each_round():
    assert [rotated(["a", "b", "c"], number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_ratios_compare_loads_of_one_round():
    comparison = Comparison(12, {FLARE: [2.0, 4.0, 1.0], RAW: [1.0, 4.0, 1.0]})
    assert comparison.ratio(FLARE, RAW) == 1.0
    assert comparison.rate(FLARE) == 6.0


def test_repetitions_are_counted_together():
    parts = [Comparison(12, {FLARE: [2.0], RAW: [1.0]}), Comparison(12, {FLARE: [4.0], RAW: [3.0]})]
    assert joined(parts) == Comparison(12, {FLARE: [2.0, 4.0], RAW: [1.0, 3.0]})


def test_without_peers_flare_is_compared_with_the_raw_read(tmp_path):
    settings = GroupSettings(
        world_size=1,
        directory=str(tmp_path),
        bytes_per_rank=1 << 20,
        page_bytes=64 << 10,
        record_bytes=256 << 20,
        num_threads=2,
        num_outstanding=8,
    )
    comparison = compare(settings, 2, lmcache_python=None, nixl_python=None)
    assert {side: len(seconds) for side, seconds in comparison.seconds.items()} == {FLARE: 2, RAW: 2}


def test_an_interpreter_that_does_not_exist_is_named():
    with (
        pytest.raises(UsageError, match="NIXL cannot be started: /no/python: No such file"),
        peer_side("NIXL", Path("/no/python"), "nixl_posix.py", {}),
    ):
        pytest.fail("it started")


def test_a_peer_that_ends_is_named(tmp_path):
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\nexit 1\n")
    stub.chmod(0o700)
    with pytest.raises(FlareError, match="NIXL ended"), peer_side("NIXL", stub, "nixl_posix.py", {}):
        pytest.fail("it was ready")


def test_a_peer_that_loads_other_bytes_fails_the_comparison(tmp_path):
    answers = [json.dumps({"seconds": 0.5, "problem": problem}) for problem in ("", "page 3 holds other bytes")]
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\n" + "".join(f"read line\necho '{answer}'\n" for answer in answers))
    stub.chmod(0o700)
    with peer_side("NIXL", stub, "nixl_posix.py", {}) as load, pytest.raises(FlareError, match="NIXL: page 3 holds"):
        load()


@pytest.mark.parametrize("script", ["lmcache_disk.py", "nixl_posix.py"])
def test_the_peers_scripts_import_nothing_of_flare(script):
    from flare_qualify import peer_sides

    path = Path(peer_sides.__file__).parent / script
    code = f"import runpy, sys; runpy.run_path({str(path)!r}); print([name for name in sys.modules if 'flare' in name])"
    assert subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True).stdout.strip() == b"[]"
