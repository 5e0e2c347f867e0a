"""One rank of a real gloo group, run as a process: loads a model, completes a prompt, prints what came as JSON."""

from __future__ import annotations

import fcntl
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from flare_core.compute.collectives import connect_collectives
from flare_core.compute.loading import load_runner
from flare_core.plan import Run, RunKind, SequenceStart, StepPlan
from flare_core.sampling import SamplingParams


class FileTable:
    """A :class:`flare_core.ports.KeyValue` of one file a key, for processes that share a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, key: str) -> Path:
        return self._directory / key.encode().hex()

    def set(self, key: str, value: bytes) -> None:
        staging = self._path(key).with_suffix(f".{np.random.default_rng().integers(1 << 60)}")
        staging.write_bytes(value)
        staging.rename(self._path(key))

    def get(self, key: str, timeout_seconds: float) -> bytes:
        self.wait([key], timeout_seconds)
        return self._path(key).read_bytes()

    def add(self, key: str, amount: int) -> int:
        with (self._directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = amount + (int(self._path(key).read_bytes()) if self._path(key).exists() else 0)
            self.set(key, str(total).encode())
        return total

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no value for {keys}")
            time.sleep(0.002)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with (self._directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            value = self._path(key).read_bytes() if self._path(key).exists() else b""
            if value == expected:
                self.set(key, desired)
                value = desired
        return value

    def delete(self, key: str) -> bool:
        existed = self._path(key).exists()
        self._path(key).unlink(missing_ok=True)
        return existed

    def num_keys(self) -> int:
        return len(list(self._directory.iterdir()))


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, world_size = settings["rank"], settings["world_size"]
    collectives = connect_collectives(
        FileTable(Path(settings["table"])),
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
        bind_address="127.0.0.1",
        timeout_seconds=60,
    )
    runner = load_runner(
        Path(settings["model"]),
        rank=rank,
        world_size=world_size,
        collectives=collectives,
        dtype=settings["dtype"],
        page_tokens=16,
        num_pages=16,
        digest_cache=Path(settings["table"]) / f"digests-{rank}.json",
    ).runner
    prompt = settings["prompt"]
    count = len(prompt)
    params = SamplingParams(max_tokens=20, seed=3, temperature=settings["temperature"], logprobs=5)
    start = SequenceStart(0, np.array(prompt, dtype="<u4").tobytes(), count, params)
    runs = [Run(0, RunKind.PREFILL, 0, count - 1, tuple(range(10))), Run(0, RunKind.FIRST, count - 1, 1)]
    runs += [Run(0, RunKind.DECODE, count + step, 1) for step in range(7)]
    before = collectives.num_collectives
    tokens = []
    for step, run in enumerate(runs):
        plan = StepPlan(step=step + 1, starts=(start,) if step == 0 else (), runs=(run,))
        tokens += [(item.token_id, item.logprobs.logprob) for item in runner.launch(plan).result().tokens]
    print(json.dumps({"tokens": tokens, "collectives": collectives.num_collectives - before}))


if __name__ == "__main__":
    main()
