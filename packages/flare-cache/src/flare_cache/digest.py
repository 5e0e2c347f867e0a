"""The digest of a record's sections: xxh3_128 over the section's address and its bytes.

Binding the address (store, rank, index) into the digest finds a section that lies in the wrong file, on the wrong
rank or at the wrong index, as well as one whose bytes changed. It guards against chance, not against someone who
can write the directory. This module knows neither files nor headers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

__all__ = ["DIGEST_BYTES", "ROW_INDEX", "section_digest"]

DIGEST_BYTES = 16
ROW_INDEX = 0xFFFF_FFFF
"""The index that the row's digest is bound to; pages and the tail have their position in the file."""

_ADDRESS = struct.Struct("<16sII8x")


def section_digest(store_id: bytes, rank: int, *, index: int, payload: Iterable[memoryview]) -> bytes:
    """Digest (16 bytes) of the section ``index`` of one rank's record; ``payload`` is its bytes in pieces.

    Blocks for the time of reading the payload once; the GIL is released for pieces above a few KiB.
    """
    digest = xxhash.xxh3_128(_ADDRESS.pack(store_id, rank, index))
    for piece in payload:
        digest.update(piece)
    return digest.digest()
