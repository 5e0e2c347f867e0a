"""The cluster key: its file, and the keys derived from it. Owns file checks and HKDF; knows no protocol.

HKDF-SHA256 (RFC 5869) is written with the standard library, so that printing a key or a plaintext link loads no
cryptographic extension.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import IO

from flare_transport.errors import KeyFileError

__all__ = ["KEY_BYTES", "derive_key", "generate_key", "load_key_file", "read_private_file", "write_key"]

KEY_BYTES = 32
_MAX_FILE_BYTES = 4096
_HEX_KEY = re.compile(rb"[0-9a-fA-F]{64}")


def generate_key() -> str:
    """Return a new random 32-byte key as a line of 64 hexadecimal digits, without the newline."""
    return secrets.token_hex(KEY_BYTES)


def write_key(file: IO[str]) -> None:
    """Write a new key and a newline to `file`; where that is a regular file, close it to other users first.

    So `flare key > cluster.key` makes a file that `load_key_file` accepts under any umask.
    """
    try:
        descriptor = file.fileno()
    except OSError:  # a stream without a descriptor, as in-memory ones are
        descriptor = -1
    if descriptor >= 0 and stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)
    file.write(generate_key() + "\n")


def read_private_file(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Read a file of secrets, at most its first `max_bytes`; raises `KeyFileError` naming the file and the remedy.

    The file must be regular, owned by this user or by root, and closed to group and others. Does not block on a pipe.
    """
    name = Path(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            status = os.fstat(descriptor)
            _check_private(name, status)
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(max_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise KeyFileError(f"key file {name}: {error.strerror}") from error


def _check_private(name: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"key file {name} is not a regular file")
    if status.st_uid not in {os.geteuid(), 0}:
        raise KeyFileError(
            f"key file {name} belongs to user {status.st_uid}; it must belong to the user who runs flare"
        )
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise KeyFileError(f"key file {name} is open to other users (mode {mode:04o}); run: chmod 600 {name}")


def load_key_file(path: str | os.PathLike[str]) -> bytes:
    """Read a 32-byte key written as 64 hexadecimal digits; raises `KeyFileError` naming the file and the remedy.

    The file must be as `read_private_file` wants it.
    """
    name = Path(path)
    try:
        content = read_private_file(name, max_bytes=_MAX_FILE_BYTES)
    except KeyFileError as error:
        if isinstance(error.__cause__, OSError):
            raise KeyFileError(f"{error}; make one with: flare key > {name}") from error
        raise
    text = content.strip()
    if _HEX_KEY.fullmatch(text) is None:
        raise KeyFileError(
            f"key file {name} does not hold a key: expected {2 * KEY_BYTES} hex digits, found {len(text)} bytes; "
            f"make one with: flare key > {name}"
        )
    return bytes.fromhex(text.decode("ascii"))


def derive_key(key: bytes, purpose: str, *, salt: bytes = b"", num_bytes: int = KEY_BYTES) -> bytes:
    """Derive `num_bytes` (at most 8160) from `key` for one `purpose`: HKDF-SHA256, info = the purpose in UTF-8."""
    pseudorandom = hmac.digest(salt or bytes(hashlib.sha256().digest_size), key, "sha256")
    derived, block, counter = b"", b"", 0
    while len(derived) < num_bytes:
        counter += 1
        block = hmac.digest(pseudorandom, block + purpose.encode() + bytes([counter]), "sha256")
        derived += block
    return derived[:num_bytes]
