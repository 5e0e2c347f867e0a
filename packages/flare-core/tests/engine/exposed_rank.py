"""One rank of a gloo group, run as a process: says which ports it listens on, then sums a tensor that is recognised."""

from __future__ import annotations

import ipaddress
import json
import sys
from pathlib import Path

import torch
from gloo_rank import FileTable

from flare_core.compute.collectives import connect_collectives

PATTERN = 1234.5678


def listening() -> list[str]:
    """Addresses of this process's listening TCP sockets, without ports."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(str(descriptor.readlink()))
        except OSError:  # the directory's own
            continue
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                addresses.append(str(ipaddress.ip_address(words)))
    return addresses


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
    print(json.dumps({"listening": listening(), "sum": tensor[0].item()}), flush=True)


if __name__ == "__main__":
    main()
