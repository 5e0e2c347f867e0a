"""Prefix keys: a SHA-256 chain over whole pages of token ids, rooted in the set fingerprint and the salt.

``key_i = SHA-256("flare/key/1" || key_{i-1} || n || token ids as u32 LE)``; the root is
``SHA-256("flare/root/1" || set fingerprint || salt)``. A partial page at a record's end is keyed the same way
with its own token count n. Keys are never truncated and never taken from a client.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "TokenIds",
    "chain_keys",
    "next_key",
    "packed_chain_keys",
    "root_key",
    "salt_key_id",
    "tenant_salt",
    "token_array",
]

TokenIds = NDArray[np.uint32]
"""One-dimensional array of token ids, dtype ``<u4``."""

_COUNT = struct.Struct("<I")


def token_array(token_ids: object) -> TokenIds:
    """``token_ids`` (any sequence of ints) as a contiguous ``<u4`` array; the caller has checked the range."""
    return np.ascontiguousarray(token_ids, dtype="<u4")


def root_key(set_fingerprint: bytes, salt: bytes) -> bytes:
    """The key that precedes the first page of every prompt with this salt."""
    return hashlib.sha256(b"flare/root/1" + set_fingerprint + salt).digest()


def next_key(parent: bytes, token_ids: TokenIds) -> bytes:
    """Key of the page, whole or partial, that holds ``token_ids`` behind ``parent``."""
    digest = hashlib.sha256(b"flare/key/1")
    digest.update(parent)
    digest.update(_COUNT.pack(len(token_ids)))
    digest.update(token_ids.tobytes())
    return digest.digest()


def chain_keys(root: bytes, token_ids: TokenIds, page_tokens: int) -> list[bytes]:
    """Keys of the whole pages of ``token_ids``, in order; a partial page at the end has no key here."""
    return packed_chain_keys(root, token_ids.tobytes(), page_tokens)


def packed_chain_keys(root: bytes, token_ids: bytes, page_tokens: int) -> list[bytes]:
    """:func:`chain_keys` of ids that are packed already, u32 little endian."""
    keys: list[bytes] = []
    data = memoryview(token_ids)
    step = 4 * page_tokens
    prefix = b"flare/key/1"
    count = _COUNT.pack(page_tokens)
    key = root
    for at in range(0, len(data) // step * step, step):
        digest = hashlib.sha256(prefix)
        digest.update(key + count)
        digest.update(data[at : at + step])
        key = digest.digest()
        keys.append(key)
    return keys


def tenant_salt(salt_key: bytes, tenant: str, cache_salt: str) -> bytes:
    """HMAC-SHA256 of tenant and request salt under the server's salt key; 32 bytes, made on the server only."""
    return hmac.digest(salt_key, tenant.encode() + b"\x00" + cache_salt.encode(), "sha256")


def salt_key_id(salt_key: bytes) -> bytes:
    """16 bytes that name a salt key without revealing it."""
    return hashlib.sha256(b"flare/salt-key-id/1" + salt_key).digest()[:16]
