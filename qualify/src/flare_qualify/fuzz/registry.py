"""All targets by name. The only place of this package that knows every one."""

from __future__ import annotations

from collections.abc import Sequence

from flare_qualify.fuzz.target import Target
from flare_qualify.fuzz.targets.directory import DIRECTORY
from flare_qualify.fuzz.targets.files import JOIN_INDEX, KEY_FILES, SET_FILE, SETTINGS
from flare_qualify.fuzz.targets.frames import FRAMES
from flare_qualify.fuzz.targets.greeting import GREETING
from flare_qualify.fuzz.targets.handshake import HANDSHAKE
from flare_qualify.fuzz.targets.http import HTTP
from flare_qualify.fuzz.targets.links import LINKS
from flare_qualify.fuzz.targets.messages import MESSAGES
from flare_qualify.fuzz.targets.pool import POOL, SERVICE
from flare_qualify.fuzz.targets.protocols import JOBS, JOIN, KEY_VALUES
from flare_qualify.fuzz.targets.records import RECORD

__all__ = ["TARGETS", "chosen"]

TARGETS = (
    FRAMES,
    HANDSHAKE,
    GREETING,
    RECORD,
    MESSAGES,
    LINKS,
    JOIN,
    JOBS,
    KEY_VALUES,
    SERVICE,
    POOL,
    HTTP,
    DIRECTORY,
    SET_FILE,
    JOIN_INDEX,
    KEY_FILES,
    SETTINGS,
)


def chosen(names: Sequence[str]) -> list[Target]:
    """The targets of these names, or all.

    Raises:
        ValueError: a name that no target has.
    """
    by_name = {target.name: target for target in TARGETS}
    for name in names:
        if name not in by_name:
            msg = f"there is no fuzz target {name!r}; targets are {', '.join(by_name)}"
            raise ValueError(msg)
    return [by_name[name] for name in names] or list(TARGETS)
