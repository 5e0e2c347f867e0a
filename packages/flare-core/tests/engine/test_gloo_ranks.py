"""Ranks as real processes over gloo, meeting in a table that is not torch's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flare_core.sampling import SamplingParams

NUM_LAYERS = 2


def run_processes(directory: Path, table: Path, prompt, world_size: int, *, temperature=0.0, dtype="float32"):
    table.mkdir()
    settings = {
        "model": str(directory),
        "table": str(table),
        "prompt": prompt,
        "world_size": world_size,
        "temperature": temperature,
        "dtype": dtype,
    }
    script = Path(__file__).with_name("gloo_rank.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(settings | {"rank": rank})],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world_size
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize(("world_size", "temperature"), [(2, 0.0), (3, 1.0)])
def test_gloo_ranks_give_the_tokens_of_one_rank(world_size, temperature, checkpoint, load, prompt, tmp_path):
    directory = checkpoint("llama")
    params = SamplingParams(max_tokens=20, seed=3, temperature=temperature, logprobs=5)
    alone = load(directory).complete(prompt, 8, params)
    outputs = run_processes(directory, tmp_path / "table", prompt, world_size, temperature=temperature)
    for output in outputs:
        assert output["tokens"] == outputs[0]["tokens"]
        assert [token for token, _ in output["tokens"]] == [token.token_id for token in alone]
        for (_, value), token in zip(output["tokens"], alone, strict=True):
            assert value == pytest.approx(token.logprobs.logprob, abs=1e-4)


def test_a_step_takes_two_sums_a_layer_one_for_the_embedding_and_one_gather(checkpoint, prompt, tmp_path):
    """A prefill stops at the last layer's keys and values and takes two less."""
    outputs = run_processes(checkpoint("qwen3"), tmp_path / "table", prompt, 2)
    num_steps, num_sampling = 9, 8
    assert {output["collectives"] for output in outputs} == {num_steps * (2 * NUM_LAYERS + 1) - 2 + num_sampling}


def test_gloo_sums_bfloat16(checkpoint, prompt, tmp_path):
    outputs = run_processes(checkpoint("llama"), tmp_path / "table", prompt, 2, dtype="bfloat16")
    assert outputs[0]["tokens"] == outputs[1]["tokens"]
