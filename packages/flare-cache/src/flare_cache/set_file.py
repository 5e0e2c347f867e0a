"""``set.json``: which record set, rank and world size a directory belongs to; readable by people.

Written when a directory joins for the first time and checked at every start, so that a directory of another model,
rank or world size is refused by name instead of being a cache of misses. Knows no record.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from flare_cache.directory_files import DirectoryFiles, read_whole
from flare_core.errors import UsageError
from flare_core.geometry import SetIdentity

__all__ = [
    "SET_FILE_NAME",
    "SET_TEMPORARY_NAME",
    "SetFile",
    "check_set_file",
    "new_set_file",
    "read_set_file",
    "write_set_file",
]

SET_FILE_NAME = "set.json"
SET_FILE_FORMAT = 1
SET_TEMPORARY_NAME = "set.json.tmp"
_MAX_BYTES = 4 << 20
_PRIVATE = 0o600


class SetFile(msgspec.Struct, frozen=True, kw_only=True):
    """What ``set.json`` holds; byte strings in hexadecimal.

    Attributes:
        format: version of this file.
        set_id: 16 bytes drawn at the first join, the same on every rank.
        set_fingerprint: root of the set's keys.
        rank, world_size: whose directory it is.
        salt_key_id: names the salt key without revealing it.
        fields: readable fields behind the fingerprint (``SetIdentity.fields``).
    """

    format: int = SET_FILE_FORMAT
    set_id: str
    set_fingerprint: str
    rank: int
    world_size: int
    salt_key_id: str
    fields: dict[str, str]


def new_set_file(identity: SetIdentity, rank: int, *, set_id: bytes, salt_key_id: bytes) -> SetFile:
    """The file of ``rank`` in the set of ``identity``."""
    return SetFile(
        set_id=set_id.hex(),
        set_fingerprint=identity.fingerprint().hex(),
        rank=rank,
        world_size=identity.world_size,
        salt_key_id=salt_key_id.hex(),
        fields=identity.fields(),
    )


def read_set_file(files: DirectoryFiles, path: str) -> SetFile | None:
    """The directory's ``set.json``; None where there is none. ``path`` names the directory in messages.

    Raises:
        UsageError: unreadable, damaged, or of a newer format.
    """
    remedy = "give another directory, or remove this one's contents to start it anew"
    try:
        fd = files.open(SET_FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}/{SET_FILE_NAME} cannot be opened: {error.strerror}; {remedy}") from error
    try:
        data = read_whole(files, fd, _MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{path}/{SET_FILE_NAME} cannot be read: {error.strerror}; {remedy}") from error
    finally:
        files.close(fd)
    try:
        found = msgspec.json.decode(data, type=SetFile)
        bytes.fromhex(found.set_id)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}/{SET_FILE_NAME} is damaged ({error}); {remedy}") from error
    if found.format > SET_FILE_FORMAT:
        raise UsageError(
            f"{path}/{SET_FILE_NAME} has format {found.format}, this version reads {SET_FILE_FORMAT}: "
            "use the version of flare that wrote it, or give another directory"
        )
    return found


def write_set_file(files: DirectoryFiles, content: SetFile) -> None:
    """Write ``set.json`` so that it is there whole or not at all, also after a power cut.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    data = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = files.open(SET_TEMPORARY_NAME, flags, _PRIVATE)
    try:
        try:
            if files.pwritev(fd, [memoryview(data)], 0) != len(data):
                raise OSError(f"{SET_FILE_NAME} was written short")
            files.fsync(fd)
        finally:
            files.close(fd)
        files.rename(SET_TEMPORARY_NAME, SET_FILE_NAME)
        files.fsync_directory()
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(SET_TEMPORARY_NAME)
        raise


def check_set_file(found: SetFile, expected: SetFile, path: str) -> None:
    """Does the directory belong to this rank of this set? The set id is not compared: the join does.

    Raises:
        UsageError: names every field that differs, with both values, and the remedy.
    """
    pairs = {
        "world size": (str(found.world_size), str(expected.world_size)),
        "rank": (str(found.rank), str(expected.rank)),
        "salt key id": (found.salt_key_id, expected.salt_key_id),
    }
    for name in sorted(found.fields.keys() | expected.fields.keys()):
        pairs.setdefault(name.replace("_", " "), (found.fields.get(name, "none"), expected.fields.get(name, "none")))
    pairs["set fingerprint"] = (found.set_fingerprint, expected.set_fingerprint)
    differing = [f"{name} is {was}, this run has {now}" for name, (was, now) in pairs.items() if was != now]
    if not differing:
        return
    remedy = "give this run another directory, or remove the old records"
    if found.salt_key_id != expected.salt_key_id and len(differing) == 1:
        remedy = "give the key file that the directory was written with, or another directory"
    raise UsageError(f"{path} holds records of another run: {'; '.join(differing)}: {remedy}")
