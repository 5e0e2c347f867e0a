"""Files of failing worlds: options, the rule that was broken, and a note; kept and replayed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flare_qualify.sim.options import Options

__all__ = ["SeedFile", "read_seed_file", "seed_files", "write_seed_file"]

_DIRECTORY = Path(__file__).parents[3] / "seeds"


class SeedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One world.

    Attributes:
        options: all that it needs.
        bug: planted bug that it shows; empty for a world that once broke a rule by itself.
        rule: the rule that it broke (with ``bug`` planted, if any).
        note: what was wrong, for people.
    """

    options: Options
    bug: str = ""
    rule: str = ""
    note: str = ""


def write_seed_file(path: Path, content: SeedFile) -> None:
    """Write it, readable by people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def read_seed_file(path: Path) -> SeedFile:
    """Read it. Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=SeedFile)


def seed_files(directory: Path = _DIRECTORY) -> list[Path]:
    """The kept ones, by name."""
    return sorted(directory.glob("*.json"))
