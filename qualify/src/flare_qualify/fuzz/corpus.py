"""Inputs kept as small files: ``qualify/corpus/<target>/``, one file an input; a crash is kept as ``crash-…``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from flare_qualify.fuzz.target import Target

__all__ = ["REPOSITORY_CORPUS", "Corpus"]

REPOSITORY_CORPUS = Path(__file__).resolve().parents[3] / "corpus"


@dataclass(frozen=True, slots=True)
class Corpus:
    """The inputs of all targets under ``root``; crashes are kept there too, or under ``crashes`` where given."""

    root: Path = REPOSITORY_CORPUS
    crashes: Path | None = None

    def directory(self, target: Target) -> Path:
        """Where the inputs of ``target`` lie."""
        return self.root / target.name

    def inputs(self, target: Target) -> list[bytes]:
        """The target's own seeds, then the files, by name; former crashes are among them."""
        directory = self.directory(target)
        files = sorted(path for path in directory.glob("*") if path.is_file()) if directory.is_dir() else []
        return [*target.seeds(), *(path.read_bytes() for path in files)]

    def keep(self, target: Target, data: bytes) -> Path:
        """Add an input; the file."""
        directory = self.directory(target)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / hashlib.sha256(data).hexdigest()[:16]
        path.write_bytes(data)
        return path

    def keep_crash(self, target: Target, data: bytes) -> Path:
        """Write an input that broke the rule; the file."""
        directory = (self.crashes or self.root) / target.name
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"crash-{hashlib.sha256(data).hexdigest()[:16]}"
        path.write_bytes(data)
        return path
