"""A worker that neither dies nor answers ends its server, as a silent rank ends its group."""

import os
import signal

import httpx
import pytest

from flare_core.testing.oracle_config import OracleConfig

BODY = {"prompt": "x", "max_tokens": 100_000, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stopped_worker_is_given_up_and_its_streams_end_unfinished(make_ranks, world_size):
    ranks = make_ranks(world_size=world_size, config=OracleConfig(eos_bias=-1e9)).start()
    worker = ranks.worker_pid()
    with httpx.stream("POST", f"{ranks.url}/v1/completions", json=BODY, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(worker, signal.SIGSTOP)
        rest = list(lines)
    assert "data: [DONE]" not in rest
    assert set(ranks.wait().values()) == {70}
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
