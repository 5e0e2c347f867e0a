"""Record directories with very many small records."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from flare_cache.digest import section_digest
from flare_cache.jobs import RecordIdentity, record_file_name
from flare_cache.record import encode_header
from flare_core.geometry import Axis, Geometry, Plane
from flare_core.keys import chain_keys, root_key, token_array

__all__ = ["SET_FINGERPRINT", "read_first_blocks", "small_geometry", "small_identities", "write_records"]

SET_FINGERPRINT = hashlib.sha256(b"many small records").digest()
PAGE_TOKENS = 64
RECORDS_PER_CHAIN = 100


def small_geometry(rank: int = 0, world_size: int = 1) -> Geometry:
    """Pages of 64 tokens in 4096 bytes."""
    axes = (Axis("token", PAGE_TOKENS), Axis("dim", 16))
    return Geometry(rank, world_size, PAGE_TOKENS, (Plane("kv", "float32", axes),))


def small_identities(num_records: int) -> Iterator[tuple[RecordIdentity, bytes]]:
    """Identities and token ids of records of one page each, in chains of :data:`RECORDS_PER_CHAIN`, parents first."""
    made = chain = 0
    while made < num_records:
        root = root_key(SET_FINGERPRINT, struct.pack("<I", chain))
        token_ids = token_array(range(chain, chain + PAGE_TOKENS * RECORDS_PER_CHAIN))
        keys = chain_keys(root, token_ids, PAGE_TOKENS)[: num_records - made]
        for position, key in enumerate(keys):
            start = position * PAGE_TOKENS
            identity = RecordIdentity(
                key=key,
                store_id=hashlib.sha256(key).digest()[:16],
                parent_key=keys[position - 1] if position else b"",
                start_key=keys[position - 1] if position else root,
                start=start,
                end=start + PAGE_TOKENS,
                page_tokens=PAGE_TOKENS,
                tail_tokens=0,
                has_row=False,
            )
            yield identity, token_ids[start : start + PAGE_TOKENS].tobytes()
        made += len(keys)
        chain += 1


def write_records(
    directory: Path, num_records: int, *, geometry: Geometry, set_fingerprint: bytes = SET_FINGERPRINT
) -> None:
    """Write that many valid records of ``geometry`` (pages of zeros) into a directory (created, mode 0700)."""
    directory.mkdir(mode=0o700, exist_ok=True)
    page = bytes(geometry.page_bytes)
    for identity, token_ids in small_identities(num_records):
        digest = section_digest(identity.store_id, geometry.rank, index=0, payload=[memoryview(page)])
        header = encode_header(identity, token_ids, set_fingerprint=set_fingerprint, geometry=geometry, digests=digest)
        fd = os.open(directory / record_file_name(identity.key), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, header + page)
        os.close(fd)


def read_first_blocks(directory: Path) -> None:
    """Merely open every file of the directory and read its first block: the least that a scan must do."""
    with os.scandir(directory) as entries:
        for entry in entries:
            fd = os.open(entry.path, os.O_RDONLY)
            os.pread(fd, 4096, 0)
            os.close(fd)
