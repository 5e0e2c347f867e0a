"""Arming failpoints in ranks of a group, and the evidence in their logs that they were reached."""

from __future__ import annotations

import re
import time

from flare_cli.failpoints import FAILPOINT_VARIABLE
from flare_qualify.group import Group

__all__ = ["arm", "disarm", "fired", "hits", "wait_fired"]


def arm(group: Group, rank: int, order: str) -> None:
    """From the next start on, ``rank`` follows ``order`` (``NAME:ACTION[@N]``, joined by ``;``)."""
    group.rank_environment.setdefault(rank, {})[FAILPOINT_VARIABLE] = order


def disarm(group: Group) -> None:
    """From the next start on, no rank fails on purpose."""
    for environment in group.rank_environment.values():
        environment.pop(FAILPOINT_VARIABLE, None)


def hits(group: Group, rank: int, point: str) -> list[str]:
    """The lines with which ``rank`` has said, in this run, that it came to ``point`` and did what was ordered."""
    return re.findall(rf"failpoint {re.escape(point)}: \S+", group.log(rank))


def fired(group: Group, rank: int, point: str) -> str:
    """The first of :func:`hits`, as evidence; empty when there is none."""
    return f"rank {rank}: {found[0]}" if (found := hits(group, rank, point)) else ""


def wait_fired(group: Group, rank: int, point: str, *, timeout: float) -> str:
    """Block until :func:`fired`; empty after ``timeout`` seconds without it."""
    deadline = time.monotonic() + timeout
    while not (found := fired(group, rank, point)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found
