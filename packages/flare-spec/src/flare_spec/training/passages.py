"""Texts that prompts are made of: prose and code of a directory and of the packages that Python has installed.

Owns where texts are looked for, how they are cut, and that each occurs once. Does not know prompts or tokens. Reads
files and imports nothing that it finds.
"""

from __future__ import annotations

import ast
import os
import random
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

__all__ = ["Passages", "collect_passages", "cut_prose"]

_PROSE_SUFFIXES: Final = frozenset({".md", ".rst", ".txt"})
_SKIPPED_FOLDERS: Final = frozenset({"node_modules", "__pycache__", "build", "dist", "venv"})
_MAX_FILE_BYTES: Final = 1 << 18
_MAX_FILES: Final = 60
"""Files of one package, so that large ones do not drown the small."""

_PROSE_CHARS: Final = (120, 420)
_CODE_CHARS: Final = (80, 520)
_WORD: Final = re.compile(r"\b[a-z]{4,12}\b")


@dataclass(frozen=True, slots=True)
class Passages:
    """What was found, each once, in an order that depends on the texts and the seed alone.

    Attributes:
        prose: paragraphs of documents and docstrings, of 120 to 420 characters.
        code: Python functions of 80 to 520 characters.
        words: common words of the prose, of 4 to 12 letters.
    """

    prose: tuple[str, ...]
    code: tuple[str, ...]
    words: tuple[str, ...]


def collect_passages(directories: Sequence[Path], *, include_packages: bool, seed: int) -> Passages:
    """Read the texts under ``directories`` and, with ``include_packages``, of installed packages. Blocks on the disk.

    Files that cannot be read or parsed are passed over. Both lists may be empty.
    """
    prose: dict[str, str] = {}
    code: dict[str, str] = {}
    sources = [_directory_files(each) for each in directories]
    if include_packages:
        sources += [_package_files(each, seed) for each in _packages()]
        for package in _packages():
            _put(prose, cut_prose(_description(package)))
    for path in (path for source in sources for path in source):
        text = _read(path)
        if path.suffix == ".py":
            docs, functions = _parts_of_python(text)
            _put(prose, (part for doc in docs for part in cut_prose(doc)))
            _put(code, functions)
        else:
            _put(prose, cut_prose(text))
    return Passages(_shuffled(prose.values(), seed), _shuffled(code.values(), seed), _words(prose.values(), seed))


def cut_prose(text: str) -> Iterator[str]:
    """Paragraphs of ``text`` that read as prose, one line each, long ones cut at a sentence."""
    least, most = _PROSE_CHARS
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        if len(line) > most:
            end = line.rfind(". ", least, most)
            line = line[: end + 1] if end > 0 else ""
        letters = sum(each.isalpha() or each == " " for each in line)
        if len(line) >= least and letters >= 0.85 * len(line):
            yield line


def _put(into: dict[str, str], texts: Iterable[str]) -> None:
    """Keep the first of those that begin alike: licences and boilerplate are in every package."""
    for text in texts:
        into.setdefault(text[:60], text)


def _shuffled(texts: Iterable[str], seed: int) -> tuple[str, ...]:
    ordered = sorted(texts)
    random.Random(seed).shuffle(ordered)
    return tuple(ordered)


def _words(texts: Iterable[str], seed: int) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for text in texts:
        for word in set(_WORD.findall(text)):
            counts[word] = counts.get(word, 0) + 1
    common = sorted(counts, key=lambda word: (-counts[word], word))[:4000]
    return _shuffled(common, seed)


def _directory_files(directory: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(directory):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        yield from (path for path in (Path(folder) / name for name in sorted(files)) if _is_text(path))


def _packages() -> list[metadata.Distribution]:
    named = {str(each.name): each for each in metadata.distributions()}
    return [named[name] for name in sorted(named)]


def _package_files(package: metadata.Distribution, seed: int) -> Iterator[Path]:
    paths = sorted(str(path.locate()) for path in package.files or () if _is_text(Path(path)))
    yield from map(Path, random.Random(seed).sample(paths, min(_MAX_FILES, len(paths))))


def _description(package: metadata.Distribution) -> str:
    payload = package.metadata.get_payload() if hasattr(package.metadata, "get_payload") else ""
    return payload if isinstance(payload, str) else ""


def _is_text(path: Path) -> bool:
    return path.suffix in {".py", *_PROSE_SUFFIXES} or path.name.startswith(("LICENSE", "COPYING", "README"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _MAX_FILE_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _parts_of_python(text: str) -> tuple[list[str], list[str]]:
    """Docstrings, and functions of a length to ask about."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return [], []
    lines, docs, functions = text.splitlines(), [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docs.append(ast.get_docstring(node) or "")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if _CODE_CHARS[0] <= len(function) <= _CODE_CHARS[1]:
                functions.append(function)
    return docs, functions
