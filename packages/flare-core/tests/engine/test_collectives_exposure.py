"""What SECURITY.md says of collectives: they listen on the rendezvous interface alone, and travel in the clear."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from flare_core.testing.exposure import loopback_traffic

ADDRESS = "127.0.0.3"
HALF = struct.pack("<f", 1234.5678 / 2)


def run_ranks(table: Path) -> list[dict]:
    table.mkdir()
    script = Path(__file__).with_name("exposed_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(table), ADDRESS],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_gloo_listens_on_the_address_it_is_given_and_nowhere_else(tmp_path):
    for output in run_ranks(tmp_path / "table"):
        assert set(output["listening"]) == {ADDRESS}
        assert output["sum"] == pytest.approx(1234.5678)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may capture what crosses loopback")
def test_what_ranks_sum_can_be_read_by_whoever_listens(tmp_path):
    with loopback_traffic(ADDRESS) as seen:
        run_ranks(tmp_path / "table")
    assert HALF * 64 in bytes(seen)
