"""Mooncake Store over TCP on loopback: a segment's process (``serve``), and a client that puts and gets when told to.

Run by an interpreter that has mooncake-transfer-engine-non-cuda and numpy. The client's standard input: one JSON object
(num_values, value_bytes, master, port), then a line for each round. Its standard output: a JSON line for each: seconds
of the put, of the get, and what is wrong.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from typing import Any

_LOCAL_BYTES = 512 << 20
_METADATA = "P2PHANDSHAKE"


def connect(port: int, segment_bytes: int, master: str) -> Any:
    """A store; with a segment it also keeps others' values."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(f"127.0.0.1:{port}", _METADATA, segment_bytes, _LOCAL_BYTES, "tcp", "", master)
    if code:
        raise SystemExit(f"Mooncake's setup returned {code}")
    return store


class Client:
    """Registered buffers, and values that come and go."""

    def __init__(self, options: dict[str, Any]) -> None:
        import numpy as np

        self._count, self._size = options["num_values"], options["value_bytes"]
        self._store = connect(options["port"], 0, options["master"])
        self._round = 0
        self._maps = [mmap.mmap(-1, self._count * self._size) for _ in range(2)]
        self._source, self._target = (np.frombuffer(mapping, dtype=np.uint8) for mapping in self._maps)
        self._source[:] = np.random.default_rng(7).integers(0, 256, len(self._source), dtype=np.uint8)
        for array in (self._source, self._target):
            if self._store.register_buffer(array.ctypes.data, len(array)):
                raise SystemExit("Mooncake does not register the buffer")

    def run(self) -> dict[str, Any]:
        """Put every value under new keys, and get it back; return codes and bytes are checked."""
        self._round += 1
        keys = [f"round {self._round} value {number}" for number in range(self._count)]
        offsets = [number * self._size for number in range(self._count)]
        sizes = [self._size] * self._count
        sources = [self._source.ctypes.data + offset for offset in offsets]
        targets = [self._target.ctypes.data + offset for offset in offsets]
        start = time.perf_counter()
        codes = self._store.batch_put_from(keys, sources, sizes)
        put_seconds = time.perf_counter() - start
        self._target[:] = 0
        start = time.perf_counter()
        got = self._store.batch_get_into(keys, targets, sizes)
        get_seconds = time.perf_counter() - start
        problem = ""
        if any(codes):
            problem = f"puts returned {sorted(set(codes))}"
        elif list(got) != sizes or not (self._source == self._target).all():
            problem = "what came back is not what was put"
        return {"put_seconds": put_seconds, "get_seconds": get_seconds, "problem": problem}


def main() -> None:
    """Answer on a descriptor of its own: the library prints what it likes on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.stdin.readline())
    if sys.argv[1:] == ["serve"]:
        store = connect(options["port"], options["segment_bytes"], options["master"])
        print(json.dumps({"problem": ""}), file=answers, flush=True)
        sys.stdin.read()
        store.close()
    else:
        client = Client(options)
        print(json.dumps({"problem": ""}), file=answers, flush=True)
        for _ in sys.stdin:
            print(json.dumps(client.run()), file=answers, flush=True)
    # Its threads do not all end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
