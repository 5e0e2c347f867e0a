"""The salt key that separates tenants' prefix caches; derived alike in the API process and in the worker.

Reads key files; knows nothing of requests.
"""

from __future__ import annotations

from pathlib import Path

from flare_cli.config import RunConfig
from flare_core.errors import UsageError
from flare_transport.errors import KeyFileError
from flare_transport.keys import derive_key, load_key_file

__all__ = ["load_cluster_key", "salt_key"]

PURPOSE = "flare/salt/1"


def load_cluster_key(path: Path) -> bytes:
    """The 32-byte key in a key file.

    Raises:
        UsageError: missing, malformed, or readable by others; says the remedy.
    """
    try:
        return load_key_file(path)
    except KeyFileError as error:
        raise UsageError(str(error)) from None


def salt_key(config: RunConfig) -> bytes:
    """The salt key: from its own file, else from the cluster key.

    A single rank without either derives it from nothing secret, so that its records are found again after a restart;
    tenants are kept apart by it all the same, because salts are made on the server only. Reads a file.

    Raises:
        UsageError: as :func:`load_cluster_key`.
    """
    if config.prefix_cache_salt_key_file is not None:
        return load_cluster_key(config.prefix_cache_salt_key_file)
    root = bytes(32) if config.key_file is None else load_cluster_key(config.key_file)
    return derive_key(root, PURPOSE)
