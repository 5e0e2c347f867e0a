"""One rank of a gloo group, run as a process: says which ports it listens on, then sums a tensor that is recognised."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from gloo_rank import FileTable

from flare_core.compute.collectives import connect_collectives
from flare_core.testing.exposure import listening

PATTERN = 1234.5678


def main() -> None:
    rank, table, address = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    collectives = connect_collectives(
        FileTable(table),
        rank=rank,
        world_size=2,
        device=torch.device("cpu"),
        bind_address=address,
        timeout_seconds=60,
    )
    tensor = torch.full((4096,), PATTERN / 2)
    collectives.all_reduce_(tensor)
    print(json.dumps({"listening": [host for host, _ in listening(os.getpid())], "sum": tensor[0].item()}), flush=True)


if __name__ == "__main__":
    main()
