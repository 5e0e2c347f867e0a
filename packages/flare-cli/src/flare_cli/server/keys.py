"""API keys: who is asking, and under which tenant name their prompts are cached.

Holds SHA-256 digests only and compares them in constant time. Does not know routes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flare_core.errors import UsageError
from flare_transport.errors import KeyFileError
from flare_transport.keys import read_private_file

__all__ = ["DEFAULT_TENANT", "KeyRing", "load_key_ring"]

DEFAULT_TENANT = "default"
MAX_KEY_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Digests of the keys in use. ``tenants`` is empty where the server asks for no key."""

    tenants: Mapping[str, bytes]
    admin: bytes | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return not self.tenants

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant whose key an ``Authorization`` header carries; None where it carries none that is known."""
        if self.is_open:
            return DEFAULT_TENANT
        presented = _digest_of(authorization)
        found = None
        for name, digest in self.tenants.items():
            # Every key is compared, so that the time tells nothing about which one matched.
            if hmac.compare_digest(digest, presented):
                found = name
        return found

    def is_admin(self, authorization: str | None) -> bool:
        """Whether the header carries the admin key."""
        return self.admin is not None and hmac.compare_digest(self.admin, _digest_of(authorization))


def _digest_of(authorization: str | None) -> bytes:
    scheme, _, key = (authorization or "").partition(" ")
    return hashlib.sha256(key.strip().encode() if scheme.lower() == "bearer" else b"").digest()


def load_key_ring(api_key_file: Path | None, admin_key_file: Path | None) -> KeyRing:
    """The keys in these files. Reads files.

    Raises:
        UsageError: a line that is not ``name: key``, a name or key given twice, an empty or unreadable file, or one
            that other users can read.
    """
    tenants: dict[str, bytes] = {}
    if api_key_file is not None:
        for number, line in _lines(api_key_file):
            name, colon, key = (part.strip() for part in line.partition(":"))
            if not colon or not name.isprintable() or not name or not key:
                msg = f"--api-key-file {api_key_file}, line {number}: expected 'name: key'"
                raise UsageError(msg)
            digest = hashlib.sha256(key.encode()).digest()
            if name in tenants or digest in tenants.values():
                msg = f"--api-key-file {api_key_file}, line {number}: a name or key that stands there before"
                raise UsageError(msg)
            tenants[name] = digest
        if not tenants:
            msg = f"--api-key-file {api_key_file}: holds no line 'name: key'"
            raise UsageError(msg)
    admin = None
    if admin_key_file is not None:
        lines = _lines(admin_key_file)
        if len(lines) != 1:
            msg = f"--admin-key-file {admin_key_file}: expected one line, the key"
            raise UsageError(msg)
        admin = hashlib.sha256(lines[0][1].encode()).digest()
    return KeyRing(tenants, admin)


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        data = read_private_file(path, max_bytes=MAX_KEY_FILE_BYTES + 1)
        text = data.decode()
    except KeyFileError as error:
        raise UsageError(str(error)) from None
    except UnicodeDecodeError:
        msg = f"{path}: is not text"
        raise UsageError(msg) from None
    if len(data) > MAX_KEY_FILE_BYTES:
        msg = f"{path}: larger than {MAX_KEY_FILE_BYTES} bytes"
        raise UsageError(msg)
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]
