"""Whether processes ended as they must: all of them, in time, with the right exit code, and without a traceback."""

from __future__ import annotations

import contextlib
import subprocess
import time

from flare_qualify.group import Group
from flare_qualify.process_facts import wait_gone
from flare_qualify.run_context import Context

__all__ = ["EXIT_POISONED", "check_all_gone", "exit_codes"]

EXIT_POISONED = 70


def exit_codes(group: Group) -> dict[int, int]:
    """Exit codes by rank of the processes that have ended."""
    codes: dict[int, int] = {}
    for rank, process in group.processes.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            codes[rank] = process.wait(0.2)
    return codes


def check_all_gone(
    context: Context,
    group: Group,
    members: dict[str, int],
    *,
    what: str,
    limit: float,
    since: float | None = None,
    spared: tuple[str, ...] = (),
    victims: tuple[int, ...] = (),
    code: int = EXIT_POISONED,
) -> bool:
    """Every process of ``members`` but ``spared`` must end within ``limit`` seconds; whether all did.

    Args:
        members: roles and process ids, taken before the fault (:meth:`Group.members`).
        since: the fault's time by the monotonic clock; now, if not given.
        victims: ranks whose exit code is the fault's own. All other ranks that end must exit with ``code``.
    """
    expected = {name: pid for name, pid in members.items() if name not in spared}
    elapsed = 0.0 if since is None else time.monotonic() - since
    gone = wait_gone(expected, timeout=limit + 5.0)
    left = sorted(expected.keys() - gone.keys())
    context.check(not left, f"{what}: {', '.join(left)} did not end")
    if gone:
        context.timed(f"{what}: every other process gone", elapsed + max(gone.values()), limit=limit)
    spared_ranks = {0 if name in {"api", "worker"} else int(name.removeprefix("rank")) for name in spared}
    for rank, found in exit_codes(group).items():
        if rank not in victims and rank not in spared_ranks:
            context.check(found == code, f"{what}: rank {rank} exited with {found}, not {code}")
            context.check("Traceback" not in group.log(rank), f"{what}: rank {rank} printed a traceback")
    return not left
