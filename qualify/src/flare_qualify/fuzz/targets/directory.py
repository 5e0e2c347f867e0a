"""The scan at start-up over directories with anything in them: names, types and contents of every kind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flare_cache.directory import TEMPORARY_NAME, RecordDirectory
from flare_cache.directory_lock import LOCK_FILE_NAME
from flare_cache.jobs import record_file_name
from flare_cache.join_index import JOIN_INDEX_NAME, JOIN_INDEX_TEMPORARY_NAME
from flare_cache.scan import scan_directory
from flare_cache.set_file import SET_FILE_NAME, SET_TEMPORARY_NAME
from flare_core.errors import UsageError
from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require
from flare_qualify.fuzz.targets.records import GEOMETRY, SET, sample_header, sample_identities

__all__ = ["DIRECTORY"]

MAX_ENTRIES = 12
_TERABYTE = 1 << 40
_OWN_TEMPORARIES = {SET_TEMPORARY_NAME, JOIN_INDEX_TEMPORARY_NAME}
_KINDS = ("file", "file", "file", "empty", "sparse", "fifo", "link", "broken link", "directory", "socket", "device")


def _names() -> tuple[str, ...]:
    keys = [identity.key.hex() for identity in sample_identities()]
    store = sample_identities()[0].store_id.hex()
    return (
        *(f"{key}.rec" for key in keys),
        f"{keys[0]}.{store}.tmp",
        f"{keys[0][:-1]}.rec",
        f"{keys[0].upper()}.rec",
        f"{keys[0]}.rec\n",
        f"{keys[0]}.rec.tmp",
        "f" * 64 + ".rec",
        JOIN_INDEX_NAME,
        SET_FILE_NAME,
        LOCK_FILE_NAME,
        JOIN_INDEX_TEMPORARY_NAME,
        "notes.txt",
        ".hidden",
        "..rec",
        "-rf",
        "a b\t*",
        "name \udcff",
    )


_NAMES = _names()


@dataclass(slots=True)
class _Watch:
    """Which names are opened while it is on, by the interpreter's own record of what it opens."""

    is_on: bool = False
    opened: list[str] = field(default_factory=list)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """For ``sys.addaudithook``."""
        if self.is_on and event == "open" and isinstance(arguments[0], str):
            self.opened.append(os.fsdecode(arguments[0]))


@dataclass(frozen=True, slots=True)
class _Entry:
    """What must stay of an entry: type, mode, size, times, inode, and the content of a small file."""

    status: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, path: Path) -> _Entry:
        status = path.lstat()
        is_small = stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20
        kept = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino, status.st_uid)
        return cls(kept, hashlib.sha256(path.read_bytes()).digest() if is_small else b"")


def _content(choices: Choices) -> bytes:
    header = sample_header(sample_identities()[choices.integer(0, 2)])
    way = choices.integer(0, 5)
    if way == 0:
        return header + bytes(64 << 10)
    if way == 1:
        return header[: choices.integer(0, len(header))]
    if way == 2:
        at = choices.integer(0, len(header) - 1)
        return header[:at] + bytes((header[at] ^ 1,)) + header[at + 1 :] + bytes(64 << 10)
    return choices.piece(200)


def _make(path: Path, kind: str, outside: Path, choices: Choices) -> None:
    match kind:
        case "file":
            path.write_bytes(_content(choices))
        case "empty":
            path.touch()
        case "sparse":
            with path.open("wb") as file:
                file.write(choices.piece(100))
                file.truncate(_TERABYTE + choices.integer(0, 1))
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(outside)
        case "broken link":
            path.symlink_to("nowhere")
        case "directory":
            path.mkdir()
            (path / "inside").touch()
        case "socket":
            with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(path.parent):
                sock.bind(path.name)
        case "device" if os.geteuid() == 0:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


def _populate(directory: Path, outside: Path, choices: Choices) -> None:
    for _ in range(choices.integer(0, MAX_ENTRIES)):
        name, kind = choices.pick(_NAMES), choices.pick(_KINDS)
        path = directory / name
        if not os.path.lexists(path):
            # A file system that cannot hold a terabyte, or this name, holds one entry less.
            with contextlib.suppress(OSError):
                _make(path, kind, outside, choices)


def _is_swept(name: str) -> bool:
    return TEMPORARY_NAME.fullmatch(name) is not None or name in _OWN_TEMPORARIES


def _check_untouched(path: Path, before: dict[str, _Entry], outside: Path) -> None:
    after = {entry.name: _Entry.of(entry) for entry in path.iterdir()}
    for name, entry in before.items():
        if _is_swept(name) and not stat.S_ISDIR(entry.status[0]):
            continue
        if name == LOCK_FILE_NAME and stat.S_ISREG(entry.status[0]):
            continue
        require(after.get(name) == entry, f"{name!r} was {entry}, is {after.get(name)}")
    appeared = after.keys() - before.keys() - {LOCK_FILE_NAME}
    require(not appeared, f"{appeared} appeared")
    require(outside.read_bytes() == b"someone else's", "a file outside was written")


def _scan(path: Path, watch: _Watch) -> None:
    """What a rank does with its directory before it knows of the others."""
    watch.opened.clear()
    watch.is_on = True
    try:
        directory = RecordDirectory.open(path, lock_timeout_seconds=0.0)
        try:
            directory.read_set()
        except UsageError:
            return
        else:
            scan = scan_directory(directory, geometry=GEOMETRY, set_fingerprint=SET, with_token_ids=True)
        finally:
            directory.close()
    except UsageError:
        return
    finally:
        watch.is_on = False
    for record in scan.records:
        name = record_file_name(record.identity.key)
        status = (path / name).lstat()
        require(stat.S_ISREG(status.st_mode), f"{name} is kept and no regular file")
        require(record.size <= status.st_size, f"{name} is kept with {record.size} of {status.st_size} bytes")
        require((record.identity.key.hex() + ".rec") == name, "a record under another name")
    named = {file.name for file in (*scan.damaged, *scan.left)}
    require(all(os.path.lexists(path / name) for name in named), "a file that is not there is listed")


def _check_opened(path: Path, before: dict[str, _Entry], watch: _Watch) -> None:
    for name in watch.opened:
        entry = before.get(name)
        if entry is None or Path(name) == path or name == LOCK_FILE_NAME:
            continue
        is_own = name.endswith(".rec") or name in {JOIN_INDEX_NAME, SET_FILE_NAME}
        require(is_own, f"{name!r} was opened and is not flare's")
        if name.endswith(".rec"):
            require(stat.S_ISREG(entry.status[0]), f"{name} was opened and is no regular file")


@contextlib.contextmanager
def _open() -> Iterator[Execute]:
    watch = _Watch()
    sys.addaudithook(watch.hook)
    root = Path(tempfile.mkdtemp(prefix="flare-fuzz-"))
    outside = root / "outside"
    outside.write_bytes(b"someone else's")

    def execute(data: bytes) -> None:
        path = root / "records"
        path.mkdir(mode=0o700)
        try:
            _populate(path, outside, Choices(data))
            before = {entry.name: _Entry.of(entry) for entry in path.iterdir()}
            _scan(path, watch)
            _check_opened(path, before, watch)
            _check_untouched(path, before, outside)
        finally:
            shutil.rmtree(path)

    try:
        yield execute
    finally:
        shutil.rmtree(root)


def _seeds() -> Iterator[bytes]:
    for kind in range(len(_KINDS)):
        yield bytes((1, 0, kind)) + bytes(8)
        yield bytes((12,)) + b"".join(bytes((name, kind)) for name in range(12))
        for name in (9, 10, 11, 3, 12):
            yield bytes((2, 0, 0, 0, 0, name, kind)) + bytes(8)


DIRECTORY = Target(
    "directory",
    "Start-up opens no foreign name and nothing but regular files as records, and changes nothing it does not own.",
    _open,
    _seeds,
    max_bytes=400,
)
