"""What a scenario may need of the machine, and whether it is there. Each look-up takes well under a second."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

from flare_cli.model_store import find_default_model

__all__ = ["NEEDS"]

_TRIAL_SECONDS = 10.0


def _tries(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=_TRIAL_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@functools.cache
def _root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


@functools.cache
def _strace() -> str:
    if shutil.which("strace") is None:
        return "strace is not installed"
    return "" if _tries("strace", "-e", "trace=none", "true") else "strace may not trace here"


@functools.cache
def _netns() -> str:
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    return "" if _tries("unshare", "--net", "ip", "link", "set", "lo", "up") else "network namespaces are not allowed"


@functools.cache
def _mount() -> str:
    trial = "mount -t tmpfs -o size=64k none /mnt"
    return "" if _tries("unshare", "--mount", "sh", "-c", trial) else "mounting is not allowed"


@functools.cache
def _loop() -> str:
    if shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        return "losetup or mkfs.ext4 is not installed"
    return "" if _tries("losetup", "--find") else "no loop device"


@functools.cache
def _torch() -> str:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


@functools.cache
def _default_model() -> str:
    return "" if find_default_model() is not None else "the default model is not here: flare model get smollm2"


@functools.cache
def _linux() -> str:
    return "" if sys.platform == "linux" else "needs Linux"


NEEDS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "root": _root,
        "strace": _strace,
        "netns": _netns,
        "mount": _mount,
        "loop": _loop,
        "torch": _torch,
        "default-model": _default_model,
        "linux": _linux,
    }
)
"""By name: why it is missing; empty where it is there."""
