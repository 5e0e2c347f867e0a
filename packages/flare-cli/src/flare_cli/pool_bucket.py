"""Opens the object store that ``flare pool serve --store URL`` names; credentials come from where its SDK looks."""

from __future__ import annotations

from datetime import timedelta

from flare_cache.pool.storage import PoolStorage
from flare_core.errors import UsageError

__all__ = ["open_bucket"]

_SCHEMES = ("s3", "gs", "az", "azure", "file")
_RETRY_SECONDS = 20.0


def open_bucket(url: str) -> PoolStorage:
    """The store, asked once whether it can be listed.

    Raises:
        UsageError: the scheme, the extra is missing, or the store cannot be reached.
    """
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES:
        msg = f"--store {url}: unknown scheme {scheme}://; give a directory or one of {', '.join(_SCHEMES)}"
        raise UsageError(msg)
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        from flare_cache.pool.object_storage import ObjectStorage
    except ModuleNotFoundError as error:
        msg = f"--store {url} needs the object store's client: pip install 'flare-cache[object-store]'"
        raise UsageError(msg) from error
    try:
        if scheme == "file":
            store = from_url(url, mkdir=True)
        else:
            # A rank that waits has given up by then, and tries again.
            store = from_url(url, retry_config={"retry_timeout": timedelta(seconds=_RETRY_SECONDS)})
        storage = ObjectStorage(store)
        next(iter(storage.list("v1/")), None)
    except (BaseError, OSError, ValueError) as error:
        msg = f"--store {url} cannot be used: {str(error).partition(chr(10))[0]}"
        raise UsageError(msg) from error
    return storage
