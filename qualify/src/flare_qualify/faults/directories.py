"""A record directory abused while a rank serves from it: moved away, removed, replaced by another or by a link, frozen.

The rank holds a descriptor of the directory it opened; whatever stands at its path afterwards is not its.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flare_qualify.faults.commands import FaultError, run

__all__ = ["Displaced", "immutable", "removed", "replaced"]


@dataclass(frozen=True, slots=True)
class Displaced:
    """What stood at a path and what stands there now.

    Attributes:
        moved: where the rank's own directory is now. decoy: where the path leads instead.
    """

    moved: Path
    decoy: Path
    evidence: str

    def strangers(self) -> list[str]:
        """Names that were made where the path leads now: nothing may ever be."""
        return sorted(path.name for path in self.decoy.iterdir())


@contextlib.contextmanager
def replaced(directory: Path, *, by_link: bool) -> Iterator[Displaced]:
    """Move the directory away and put an empty one at its path, or a symbolic link to one; put back afterwards."""
    before = directory.stat().st_ino
    moved, decoy = directory.with_name(f"{directory.name}.moved"), directory.with_name(f"{directory.name}.decoy")
    directory.rename(moved)
    decoy.mkdir(mode=0o700)
    if by_link:
        directory.symlink_to(decoy)
    else:
        decoy.rename(directory)
        decoy = directory
    try:
        now = directory.stat().st_ino
        if now == before:
            raise FaultError(f"{directory} is still the same directory")
        kind = "a symbolic link to" if by_link else "now"
        yield Displaced(moved, decoy, f"{directory.name} is {kind} inode {now}, was {before}")
    finally:
        if by_link:
            directory.unlink()
        shutil.rmtree(decoy)
        moved.rename(directory)


def removed(directory: Path) -> str:
    """Remove the directory and all that is in it; the evidence. A rank's descriptor of it stays valid, and useless."""
    count = sum(1 for _ in directory.iterdir())
    shutil.rmtree(directory)
    return f"{directory.name} and its {count} files are gone"


@contextlib.contextmanager
def immutable(path: Path) -> Iterator[str]:
    """Nothing about this file (for a directory: none of its names) can be changed, by anyone; gives the evidence.

    Raises:
        FaultError: not root, or a file system without attributes.
    """
    run("chattr", "+i", path)
    try:
        shown = run("lsattr", "-d", path).split()[0]
        if "i" not in shown:
            raise FaultError(f"{path} is not immutable: {shown}")
        yield f"{path.name} has attributes {shown}"
    finally:
        run("chattr", "-i", path)
