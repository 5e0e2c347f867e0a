"""Limits of a flare process that hold for its whole life. Called once, by the entry points."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["set_process_limits"]


def set_process_limits() -> None:
    """No core dumps, whose memory holds users' prompts; and as many descriptors as the system allows.

    The process stays open to a debugger of its own user, who may read the records anyway.
    """
    with contextlib.suppress(ValueError, OSError):
        # Linux pipes dumps to a program (``core_pattern``) whatever the limit, but for the limit of one byte.
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
