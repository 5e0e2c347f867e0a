"""NIXL's POSIX backend with io_uring and O_DIRECT, reading the sections of flare's own record files.

Run by an interpreter that has nixl-cu13 and numpy. Standard input: one JSON object (sections: path, offset and page of
each; num_pages, page_bytes, seed), then a line for each load. Standard output: a JSON line for each: seconds, problem.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from typing import Any

_POLL_SECONDS = 0.0002


class Posix:
    """An agent with one registered buffer and the record files."""

    def __init__(self, options: dict[str, Any]) -> None:
        import numpy as np
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        self._options = options
        self._agent: Any = nixl_agent("flare", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", self._parameters())
        page_bytes = options["page_bytes"]
        mapping = mmap.mmap(-1, options["num_pages"] * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)
        self._bytes[:] = 0
        base = self._bytes.ctypes.data
        files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in {s["path"] for s in options["sections"]}}
        sizes = {path: os.fstat(fd).st_size for path, fd in files.items()}
        self._agent.register_memory([(base, len(self._bytes), 0, "")], "DRAM")
        self._agent.register_memory([(0, sizes[path], fd, "") for path, fd in files.items()], "FILE")
        targets = [(base + s["page"] * page_bytes, page_bytes, 0) for s in options["sections"]]
        sources = [(s["offset"], page_bytes, files[s["path"]]) for s in options["sections"]]
        self._targets = self._agent.get_xfer_descs(targets, "DRAM")
        self._sources = self._agent.get_xfer_descs(sources, "FILE")

    def _parameters(self) -> dict[str, str]:
        known = self._agent.get_plugin_params("POSIX")
        others = {name: "false" for name in ("use_aio", "use_posix_aio") if name in known}
        return {**others, "use_uring": "true"}

    def load(self) -> tuple[float, str]:
        """Read everything; seconds, and what is wrong with the bytes."""
        self._bytes[:] = 0xA5
        start = time.perf_counter()
        handle = self._agent.initialize_xfer("READ", self._targets, self._sources, "flare")
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(_POLL_SECONDS)
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - start
        self._agent.release_xfer_handle(handle)
        return seconds, self._problem() if state == "DONE" else f"the transfer ended as {state}"

    def _problem(self) -> str:
        import numpy as np

        page_bytes = self._options["page_bytes"]
        for page in range(self._options["num_pages"]):
            content = np.random.SFC64((self._options["seed"], 0, page)).random_raw(page_bytes // 8)
            if not np.array_equal(self._bytes[page * page_bytes : (page + 1) * page_bytes].view(np.uint64), content):
                return f"page {page} holds other bytes"
        return ""


def main() -> None:
    """Answer on a descriptor of its own: the library prints what it likes on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    posix = Posix(json.loads(sys.stdin.readline()))
    print(json.dumps({"seconds": 0.0, "problem": ""}), file=answers, flush=True)
    for _ in sys.stdin:
        seconds, problem = posix.load()
        print(json.dumps({"seconds": seconds, "problem": problem}), file=answers, flush=True)
    # Its threads do not all end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
