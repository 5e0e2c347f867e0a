"""Small files that people or former runs wrote: ``set.json``, ``join.idx``, ``LOCK``, keys, settings."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flare_cache.directory import RecordDirectory
from flare_cache.directory_files import OsFiles
from flare_cache.directory_lock import LOCK_FILE_NAME, current_holder
from flare_cache.join_index import JOIN_INDEX_NAME
from flare_cache.join_set import summarise
from flare_cache.record import identity_problem
from flare_cache.record_table import IDENTITY
from flare_cache.scan import save_join_index, scan_directory
from flare_cache.set_file import SET_FILE_NAME, SetFile, check_set_file, read_set_file
from flare_cli.config import check_config
from flare_cli.resolve import resolve
from flare_cli.server.keys import load_key_ring
from flare_core.errors import UsageError
from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require
from flare_qualify.fuzz.targets.records import GEOMETRY, SET, sample_header, sample_identities
from flare_qualify.fuzz.tree import changed
from flare_transport import KeyFileError, load_key_file

__all__ = ["JOIN_INDEX", "KEY_FILES", "SETTINGS", "SET_FILE"]

_MAGIC_BYTES = 9
_IDENTITIES_AT = 2


@contextlib.contextmanager
def _in_directory(execute: Callable[[Path, Choices], None]) -> Iterator[Execute]:
    with tempfile.TemporaryDirectory(prefix="flare-fuzz-") as name:
        yield lambda data: execute(Path(name), Choices(data))


_SET_FILE = SetFile(
    set_id="00" * 16,
    set_fingerprint=SET.hex(),
    rank=0,
    world_size=2,
    salt_key_id="00" * 16,
    fields={"page_tokens": "4", "kv dtype": "float32"},
)


def _json(value: object, choices: Choices) -> bytes:
    """A document like ``value``, changed, cut, deep or none at all."""
    way = choices.integer(0, 7)
    if way == 7:
        return choices.rest()
    if way == 6:
        return b'{"fields":' * 20 + b'{"a":' * 3000
    tree = msgspec.json.decode(msgspec.json.encode(value))
    for _ in range(choices.integer(0, 3)):
        tree = changed(tree, choices)
    try:
        text = json.dumps(tree, default=repr).encode()
    except RecursionError:
        text = b"{}"
    return text[: choices.integer(0, len(text))] if way == 5 else text


def _read_set(path: Path, choices: Choices) -> None:
    is_lock = choices.integer(0, 3) == 3
    (path / (LOCK_FILE_NAME if is_lock else SET_FILE_NAME)).write_bytes(
        _json({"pid": 1, "host": "h"} if is_lock else _SET_FILE, choices)
    )
    dir_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if is_lock:
            require(current_holder(dir_fd) is None, "a lock that nobody holds has a holder")
            return
        found = read_set_file(OsFiles(dir_fd), str(path))
        if found is not None:
            check_set_file(found, _SET_FILE, str(path))
            require(
                msgspec.structs.replace(found, set_id="", format=1)
                == msgspec.structs.replace(_SET_FILE, set_id="", format=1),
                "another set was taken for this one",
            )
    except UsageError:
        return
    finally:
        os.close(dir_fd)


def _make_records(path: Path) -> tuple[frozenset[bytes], bytes]:
    """Sound record files in ``path``; their keys, and the ``join.idx`` that they give."""
    path.mkdir(mode=0o700)
    for identity in sample_identities():
        (path / f"{identity.key.hex()}.rec").write_bytes(sample_header(identity) + bytes(8 * GEOMETRY.page_bytes))
    directory = RecordDirectory.open(path)
    try:
        scan = scan_directory(directory, geometry=GEOMETRY, set_fingerprint=SET, with_token_ids=True)
        save_join_index(directory, scan.records, geometry=GEOMETRY, set_fingerprint=SET)
    finally:
        directory.close()
    return frozenset(record.identity.key for record in scan.records), (path / JOIN_INDEX_NAME).read_bytes()


def _odd_index(written: bytes, choices: Choices) -> bytes:
    """``join.idx`` with changed entries and a checksum that fits them."""
    if choices.integer(0, 7) == 7:
        return choices.rest()
    magic, payload = written[:_MAGIC_BYTES], written[_MAGIC_BYTES + 32 :]
    tree = msgspec.msgpack.decode(payload)
    for _ in range(choices.integer(1, 3)):
        tree = _with_odd_number(tree, choices) if choices.flag() else changed(tree, choices)
    try:
        payload = msgspec.msgpack.encode(tree)
    except (OverflowError, RecursionError):
        return b""
    return magic + hashlib.sha256(payload).digest() + payload


def _with_odd_number(tree: Any, choices: Choices) -> Any:
    """One number of one record's identity changed, where there still are identities."""
    if not isinstance(tree, list) or len(tree) <= _IDENTITIES_AT or not isinstance(tree[_IDENTITIES_AT], bytes):
        return tree
    rows = np.frombuffer(
        tree[_IDENTITIES_AT][: len(tree[_IDENTITIES_AT]) // IDENTITY.itemsize * IDENTITY.itemsize], dtype=IDENTITY
    ).copy()
    if len(rows):
        field = choices.pick(("start", "end", "page_tokens", "tail_tokens", "flags"))
        number = choices.pick((0, 1, 3, 4, 5, 8, 1 << 20, 1 << 30, 1 << 31, 1 << 41, 1 << 62))
        row = choices.integer(0, len(rows) - 1)
        rows[field][row] = number % (1 << 32) if rows[field].dtype.itemsize == 4 else number
    return [*tree[:_IDENTITIES_AT], rows.tobytes(), *tree[_IDENTITIES_AT + 1 :]]


@contextlib.contextmanager
def _open_join_index() -> Iterator[Execute]:
    """A hint that cannot be a record's is none; one that can is believed until the record is used."""
    with tempfile.TemporaryDirectory(prefix="flare-fuzz-") as name:
        path = Path(name) / "records"
        keys, written = _make_records(path)

        def execute(data: bytes) -> None:
            (path / JOIN_INDEX_NAME).write_bytes(_odd_index(written, Choices(data)))
            directory = RecordDirectory.open(path)
            try:
                scan = scan_directory(directory, geometry=GEOMETRY, set_fingerprint=SET, with_token_ids=True)
            finally:
                directory.close()
            require(not scan.damaged and not scan.left, "a hint made a sound record damaged")
            found = {record.identity.key for record in scan.records}
            require(found == keys, "a hint hid a record, or made one up")
            for record in scan.records:
                identity = record.identity
                require(identity_problem(identity) is None, f"taken from a hint: {identity_problem(identity)}")
                require(len(record.token_ids) == 4 * (identity.end - identity.start), "token ids of another length")
            require(summarise(scan.records).is_well_formed(), "a scan that cannot be told to rank zero")

        yield execute


def _read_keys(path: Path, choices: Choices) -> None:
    file = path / "keys"
    file.touch()
    file.chmod(choices.pick((0o600, 0o600, 0o600, 0o640, 0o604, 0o400)))
    mode = file.stat().st_mode & 0o077
    if choices.flag():
        file.chmod(0o600)
        file.write_bytes(choices.pick((b"5a" * 32, b"", b"\n\n")) + choices.rest())
        file.chmod(0o600 | mode)
        try:
            key = load_key_file(file)
        except KeyFileError:
            return
        require(len(key) == 32 and not mode, "a key of another length or open to others was taken")
        return
    file.write_bytes(choices.pick((b"", b"alice: key-a\n", b"alice: key-a\nbob: key-b\n")) + choices.rest())
    try:
        ring = load_key_ring(file, None)
    except UsageError:
        return
    require(not ring.is_open and all(len(digest) == 32 for digest in ring.tenants.values()), "a ring without keys")
    require(ring.tenant(None) is None and ring.tenant("Bearer ") is None, "a request without a key has a tenant")


_TOML = b"""rank = 1
port = 8000
page-tokens = 64
kv-memory = "1GiB"
prefix-cache-disk = "/records/{rank}"
rendezvous = "10.0.0.1:7000"
world-size = 2
insecure-plaintext = true
drain-timeout = "5s"
"""


def _read_settings(path: Path, choices: Choices) -> None:
    file = path / "flare.toml"
    lines = _TOML.splitlines(keepends=True)
    for _ in range(choices.integer(0, 4)):
        at = choices.integer(0, len(lines) - 1)
        line = lines[at]
        cut = choices.integer(0, len(line))
        lines[at] = line[:cut] + choices.piece(12) + line[cut + choices.integer(0, 8) :]
    file.write_bytes(b"".join(lines) + choices.rest())
    variables = {"FLARE_PORT": choices.piece(6).decode("latin-1").replace("\0", "")} if choices.flag() else {}
    try:
        config = check_config(resolve({}, variables, file=file).config)
    except UsageError:
        return
    require(0 <= config.rank < config.world_size and 0 <= config.port < 65536, "settings that cannot be were taken")


def _seeds() -> Iterator[bytes]:
    yield b""
    for number in range(16):
        yield bytes((number % 8, number % 4, number, number * 3 % 16, 1, number)) + bytes(range(number * 3))
    yield bytes((0, 0, 1))
    yield bytes((3, 7)) + b'{"pid":1,"host":"\xff"}'


SET_FILE = Target(
    "set-file",
    "set.json is this rank's, or is refused by name; LOCK has a holder only while one holds it.",
    lambda: _in_directory(_read_set),
    _seeds,
    max_bytes=600,
)
JOIN_INDEX = Target(
    "join-index",
    "Whatever join.idx says, the scan finds every sound record and nothing else.",
    _open_join_index,
    _seeds,
    max_bytes=600,
)
KEY_FILES = Target(
    "key-files",
    "A file is a key of 32 bytes closed to others, or a ring of keys, or is refused by name.",
    lambda: _in_directory(_read_keys),
    _seeds,
    words=(b"5a" * 32, b": ", b"\n", b"#"),
    max_bytes=600,
)
SETTINGS = Target(
    "settings",
    "A settings file gives settings that go together, or is refused by name.",
    lambda: _in_directory(_read_settings),
    _seeds,
    words=(b"=", b'"', b"[", b"nan", b"inf", b"-1", b"1979-05-27", b"''' '''"),
    max_bytes=600,
)
