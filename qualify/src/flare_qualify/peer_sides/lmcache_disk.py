"""LMCache's local disk backend, driven through its storage manager: stores once, then loads whenever it is told to.

Run by an interpreter that has lmcache and torch. Standard input: one JSON object (directory, num_pages, page_bytes,
num_threads, seed, direct), then a line for each load. Standard output: a JSON line for each: seconds and problem.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PAGES_PER_CHUNK = 4  # 256 tokens, LMCache's own unit
NUM_LAYERS = 32
CHUNK_TOKENS = 256
NUM_KV_HEADS = 8


def open_storage(options: dict[str, Any]) -> Any:
    """A storage manager with the local disk as its only lasting tier."""
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.event_manager import EventManager
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    gib = options["num_pages"] * options["page_bytes"] / (1 << 30)
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        local_cpu=False,
        max_local_cpu_size=1.25 * gib + 0.25,
        save_unfull_chunk=False,
        local_disk=f"file://{options['directory']}/",
        max_local_disk_size=2 * gib + 1,
        extra_config={"use_odirect": options["direct"], "disk_io_threads": options["num_threads"]},
    )
    metadata = LMCacheMetadata(
        model_name="flare",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(NUM_LAYERS, 2, CHUNK_TOKENS, NUM_KV_HEADS, _hidden(options) // NUM_KV_HEADS),
        role="worker",
        chunk_size=CHUNK_TOKENS,
    )
    return StorageManager(config, metadata, EventManager())


def _hidden(options: dict[str, Any]) -> int:
    return int(options["page_bytes"]) * PAGES_PER_CHUNK // (2 * NUM_LAYERS * CHUNK_TOKENS * 2)


def _content(options: dict[str, Any], chunk: int) -> Any:
    """The bytes of a chunk's pages, as flare's benchmark fills them on rank zero."""
    import numpy as np

    first = chunk * PAGES_PER_CHUNK
    pages = [
        np.random.SFC64((options["seed"], 0, page)).random_raw(options["page_bytes"] // 8)
        for page in range(first, first + PAGES_PER_CHUNK)
    ]
    return np.concatenate(pages).view(np.int16)


def _words(memory: Any) -> Any:
    import torch

    return memory.tensor.view(-1).view(torch.int16).numpy()


class LocalDisk:
    """The stored chunks and the way to load them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._storage = open_storage(options)
        self._num_chunks = options["num_pages"] // PAGES_PER_CHUNK
        self._name, self._backend = next(
            (name, backend) for name, backend in self._storage.storage_backends.items() if "Disk" in name
        )

    def _keys(self) -> list[Any]:
        import torch
        from lmcache.utils import CacheEngineKey

        return [CacheEngineKey("flare", 1, 0, 1000 + chunk, torch.bfloat16) for chunk in range(self._num_chunks)]

    def store(self) -> float:
        """Store every chunk; seconds until the backend has no put task left."""
        import torch

        shape = torch.Size([2, NUM_LAYERS, CHUNK_TOKENS, _hidden(self._options)])
        keys = self._keys()
        objects = [self._storage.allocate(shape, torch.bfloat16) for _ in keys]
        for chunk, memory in enumerate(objects):
            _words(memory)[:] = _content(self._options, chunk)
        start = time.perf_counter()
        self._storage.batched_put(keys, objects)
        while any(self._backend.exists_in_put_tasks(key) for key in keys):
            time.sleep(0.001)
        return time.perf_counter() - start

    def load(self) -> tuple[float, str]:
        """Load every chunk; seconds, and what is wrong with the bytes."""
        keys = self._keys()
        start = time.perf_counter()
        found = self._storage.batched_get(keys, location=self._name)
        seconds = time.perf_counter() - start
        missing = sum(memory is None for memory in found)
        problem = f"{missing} of {len(keys)} chunks are missing" if missing else ""
        for chunk, memory in enumerate(found):
            if memory is not None:
                if not (_words(memory) == _content(self._options, chunk)).all():
                    problem = f"chunk {chunk} holds other bytes"
                memory.ref_count_down()
        return seconds, problem


def main() -> None:
    """Answer on a descriptor of its own: the library prints what it likes on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    disk = LocalDisk(json.loads(sys.stdin.readline()))
    print(json.dumps({"seconds": disk.store(), "problem": ""}), file=answers, flush=True)
    for _ in sys.stdin:
        seconds, problem = disk.load()
        print(json.dumps({"seconds": seconds, "problem": problem}), file=answers, flush=True)
    # Its threads do not all end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
