"""Names of what faults make outside their own directories (namespaces, links, mounts, cgroups), and their removal.

A name holds the process id of its maker: once that process is gone, whatever still has the name is a leftover.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from flare_qualify.faults.commands import FaultError, run

__all__ = ["BLKIO_ROOT", "NETNS_ROOT", "sweep_leftovers", "unique_name"]

NETNS_ROOT = Path("/run/netns")
BLKIO_ROOT = Path("/sys/fs/cgroup/blkio")
_NAME = re.compile(r"fq(\d+)x[0-9a-f]{4}")


def unique_name() -> str:
    """A name of this process's, at most 14 characters: with one more it still names a network interface."""
    return f"fq{os.getpid()}x{secrets.token_hex(2)}"


def _is_leftover(text: str) -> bool:
    """Whether ``text`` holds a name whose maker is gone."""
    found = _NAME.search(text)
    return found is not None and not Path(f"/proc/{found[1]}").exists()


def sweep_leftovers() -> list[str]:
    """Remove what runs that were killed have left behind; what was removed. Needs root; elsewhere it finds nothing."""
    removed: list[str] = []
    for path, command in _leftovers():
        with contextlib.suppress(FaultError, OSError):
            if command:
                run(*command)
            else:
                Path(path).rmdir()
            removed.append(path)
    return removed


def _leftovers() -> Iterator[tuple[str, list[str]]]:
    """What is left and the command that removes it; none for a cgroup, which is a directory to remove."""
    if os.geteuid():
        return
    for name in _leftover_entries(NETNS_ROOT):
        yield name, ["ip", "netns", "del", name]
    for name in _leftover_entries(Path("/sys/class/net")):
        yield name, ["ip", "link", "del", name]
    loops = {device for device, backing in _loop_devices() if _is_leftover(backing)}
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        source, target = line.split()[:2]
        if source in loops or _is_leftover(source):
            yield target, ["umount", "-l", target]
    for device in sorted(loops):
        yield device, ["losetup", "-d", device]
    for name in _leftover_entries(BLKIO_ROOT):
        yield str(BLKIO_ROOT / name), []


def _leftover_entries(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if _is_leftover(path.name))


def _loop_devices() -> list[tuple[str, str]]:
    with contextlib.suppress(FaultError, ValueError):
        listed = run("losetup", "--list", "--json", "--output", "NAME,BACK-FILE")
        return [(one["name"], one["back-file"] or "") for one in json.loads(listed or "{}").get("loopdevices", ())]
    return []
