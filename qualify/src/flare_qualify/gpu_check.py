"""The main job on GPUs: cold, device, disk, disk after a restart, and the pool, on a random model of a real shape.

For a machine with at least one CUDA device (``--world-size 2`` for two, over NCCL). Weights are random, so texts mean
nothing; what is compared is that all phases give the same tokens and log-probabilities, and how long each takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flare_core.testing.checkpoints import make_tiny_checkpoint
from flare_qualify.client import Answer, complete, post_json
from flare_qualify.distance import total_variation
from flare_qualify.group import Group, GroupError
from flare_qualify.pool_process import PoolProcess, clear_records, pool_of, wait_flushed, wait_pool

__all__ = ["main"]

SHAPES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288},
}
HEADS = {
    "tiny": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    "0.6b": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "8b": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}


def make_model(directory: Path, shape: str, *, context: int) -> Path:
    """A random bf16 Qwen3 checkpoint of ``shape`` with room for ``context`` tokens."""
    fields: dict[str, Any] = SHAPES[shape] | HEADS[shape] | {"max_position_embeddings": context}
    return make_tiny_checkpoint(directory, "qwen3", dtype="bfloat16", **fields)


def ask(url: str, num_tokens: int) -> Answer:
    """A greedy answer to ``num_tokens`` fixed token ids, with top-20 log-probabilities."""
    prompt = [5 + position * 7919 % 2900 for position in range(num_tokens)]
    return complete(url, prompt, max_tokens=16, logprobs=20, timeout=900)


def run_phases(group: Group, num_tokens: int) -> dict[str, Answer]:
    """Every phase's answer; the group is started here and stopped at the end."""
    group.start(timeout=300)
    answers = {"cold": ask(group.url, num_tokens), "device": ask(group.url, num_tokens)}
    group.wait_stored()
    post_json(group.url, "/v1/cache/reset", {"tier": "device"})
    answers["disk"] = ask(group.url, num_tokens)
    group.stop(timeout=120)
    group.start(timeout=300)
    answers["disk-after-restart"] = ask(group.url, num_tokens)
    group.stop(timeout=120)
    return answers


def ask_on_cleared_disks(group: Group, num_tokens: int) -> Answer:
    """The answer of ranks whose disks were cleared while they were down: what they restore comes from the pool."""
    group.start(timeout=300)
    if not wait_flushed(group, timeout=120):
        raise GroupError(f"not everything has reached the pool: {pool_of(group)}")
    group.stop(timeout=120)
    clear_records(group)
    group.start(timeout=300)
    wait_pool(group, "on")
    answer = ask(group.url, num_tokens)
    group.wait_stored()
    group.stop(timeout=120)
    return answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 when every phase agrees with the cold one."""
    parser = argparse.ArgumentParser(prog="flare_qualify.gpu_check", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32768, help="prompt tokens")
    parser.add_argument("--directory", type=Path, default=Path("build/gpu-check"))
    parser.add_argument("--pool", action="store_true", help="with a manager: restore on cleared disks, too")
    parser.add_argument("--option", action="append", default=[], help="a further flag for every rank")
    settings = parser.parse_args(arguments)
    shutil.rmtree(settings.directory, ignore_errors=True)
    model = make_model(settings.directory / "model", settings.shape, context=settings.tokens + 64)
    options = ["--prefix-cache-min-tail", "0", *settings.option]
    devices: dict[int, Sequence[str]] = {rank: ["--device", f"cuda:{rank}"] for rank in range(settings.world_size)}
    pool = PoolProcess(settings.directory / "pool") if settings.pool else None
    if pool is not None:
        pool.start()
        options += pool.group_options()
    group = Group(model, settings.world_size, settings.directory / "group", options, rank_options=devices)
    try:
        answers = run_phases(group, settings.tokens)
        if pool is not None:
            answers["pool"] = ask_on_cleared_disks(group, settings.tokens)
    finally:
        group.kill_all()
        if pool is not None:
            pool.kill()
    cold = answers["cold"]
    table = Table(title=f"{settings.shape}, {settings.world_size} GPUs, {cold.prompt_tokens} prompt tokens")
    for column in ("phase", "TTFT s", "device", "disk", "pool", "total variation", "first at", "same text"):
        table.add_column(column, justify="right")
    agree = True
    for name, answer in answers.items():
        by_position = [
            total_variation([one], [other]) for one, other in zip(cold.logprobs, answer.logprobs, strict=True)
        ]
        distance = max(by_position)
        first = next((position for position, here in enumerate(by_position) if here > 0), None)
        agree = agree and distance == 0.0 and answer.text == cold.text
        cached = answer.cached_tokens
        tiers = (str(cached[tier]) for tier in ("device", "disk", "pool"))
        cells = f"{answer.ttft_seconds:.3f}", *tiers, f"{distance:.1e}", str(first)
        table.add_row(name, *cells, str(answer.text == cold.text))
    Console(width=110).print(table)
    sizes = [sum(file.num_bytes for file in group.record_files(rank)) for rank in range(group.world_size)]
    print(json.dumps({"record_bytes": sizes, "same_files": group.same_record_names(), "agree": agree}))
    return 0 if agree and group.same_record_names() else 1


if __name__ == "__main__":
    sys.exit(main())
