"""Where the repository's own Python files are, parsed; shared by the rules of the repository."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flare_core", "flare_transport", "flare_cache", "flare_spec", "flare_cli")


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the repository's root, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@functools.cache
def shipped() -> tuple[Source, ...]:
    """What the five packages install."""
    return tuple(_sources("packages/*/src/**/*.py"))


@functools.cache
def written() -> tuple[Source, ...]:
    """Every Python file of the repository, tests and qualification included."""
    return tuple(_sources("packages/*/src/**/*.py", "packages/*/tests/**/*.py", "qualify/**/*.py", "tests/**/*.py"))


def _sources(*patterns: str) -> Iterator[Source]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            yield Source(str(path.relative_to(ROOT)), text, ast.parse(text, str(path)))
