"""What SECURITY.md says of collectives: they listen on the rendezvous interface alone, and travel in the clear."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

ADDRESS = "127.0.0.3"
HALF = struct.pack("<f", 1234.5678 / 2)


@contextmanager
def loopback_traffic():
    """Everything that crosses loopback meanwhile, as any process with the right to capture sees it."""
    seen = bytearray()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
        tap.bind(("lo", 0))
        tap.settimeout(0.2)
        over = threading.Event()

        def listen():
            while True:
                try:
                    seen.extend(tap.recv(1 << 17))
                except TimeoutError:
                    if over.is_set():
                        return

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield seen
        finally:
            over.set()
            listener.join()


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
    with loopback_traffic() as seen:
        run_ranks(tmp_path / "table")
    assert HALF * 64 in bytes(seen)
