"""A whole group of ranks in one small process over real record directories, at which faults of disks are aimed.

``python -m flare_qualify.faults.record_child ROOT`` joins what is there, stores numbered records one after the other,
and says each on stdout the moment the engine would hear of it; so whatever was said must survive what the durability
promises. A record's bytes follow from its number alone: any process can check them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flare_cache.disk_shelf import DiskShelf, Durability
from flare_cache.testing import GroupPlan, LocalGroup, token_geometries
from flare_cache.transfer import Shelf
from flare_core.errors import FlareError, Poisoned

__all__ = ["PAGE_TOKENS", "record_plan", "record_tokens"]

PAGE_TOKENS = 16
_ROW_BYTES = 3000
_NUM_TOKENS = 3 * PAGE_TOKENS + 5
"""Three whole pages and a tail."""


def record_plan(
    root: Path, world_size: int, *, durability: Durability = Durability.PROCESS, num_threads: int = 1
) -> GroupPlan:
    """The group over ``root``: pages of 4096 bytes, rows, and disk threads as few as said, for calls in one order."""

    def change(_: int, shelf: Shelf) -> Shelf:
        return replace(shelf, durability=durability) if isinstance(shelf, DiskShelf) else shelf

    return GroupPlan(
        geometries=token_geometries(world_size, page_tokens=PAGE_TOKENS, dims=[64] * world_size, row_bytes=_ROW_BYTES),
        root=root,
        num_threads=num_threads,
        change_shelf=change,
    )


def record_tokens(number: int) -> list[int]:
    """Token ids of record ``number``; it shares nothing with another one."""
    return [1 + number * 1000 + position for position in range(_NUM_TOKENS)]


def _say(text: str) -> None:
    """One line, past every buffer: it is out when this returns."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was stored; 1 when the group could not start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--durability", type=Durability, default=Durability.PROCESS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--num-records", type=int, default=1)
    options = parser.parse_args(arguments)
    _say("starting")
    try:
        group = LocalGroup.start(record_plan(options.root, options.world_size, durability=options.durability))
    except (FlareError, OSError) as error:
        _say(f"refused {type(error).__name__}: {error}")
        return 1
    _say("joined")
    for number in range(options.first, options.first + options.num_records):
        try:
            finished = group.store(record_tokens(number))
        except Poisoned as error:  # a server's process ends the same way
            _say(f"poisoned: {error}")
            os._exit(Poisoned.exit_code)
        if finished is None:
            _say(f"known {number}")
        elif finished.failure is None and finished.num_records:
            _say(f"stored {number}")
        else:
            _say(f"failed {number} {finished.failure}")
    try:
        group.close()
    except OSError as error:  # the hint for the next start; a server warns of it
        _say(f"closed without a hint: {error}")
        os._exit(0)
    _say("closed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
