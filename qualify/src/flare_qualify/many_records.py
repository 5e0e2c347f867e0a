"""A record directory with very many small records, and how long a rank takes to scan it.

``python -m flare_qualify.many_records --num-records 100000`` prints the scan of warm and (as root) of cold files, with
and without ``join.idx``, beside merely opening and reading the first block of every file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flare_cache.digest import section_digest
from flare_cache.directory import RecordDirectory
from flare_cache.jobs import RecordIdentity, record_file_name
from flare_cache.record import encode_header
from flare_cache.scan import save_join_index, scan_directory
from flare_core.geometry import Axis, Geometry, Plane
from flare_core.keys import chain_keys, root_key, token_array
from flare_qualify.page_cache import can_drop_page_cache, drop_page_cache

__all__ = ["SET_FINGERPRINT", "small_geometry", "small_identities", "write_records"]

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


def write_records(directory: Path, num_records: int, *, geometry: Geometry) -> None:
    """Write that many valid records of ``geometry`` (pages of zeros) into a directory (created, mode 0700)."""
    directory.mkdir(mode=0o700, exist_ok=True)
    page = bytes(geometry.page_bytes)
    for identity, token_ids in small_identities(num_records):
        digest = section_digest(identity.store_id, geometry.rank, index=0, payload=[memoryview(page)])
        header = encode_header(identity, token_ids, set_fingerprint=SET_FINGERPRINT, geometry=geometry, digests=digest)
        fd = os.open(directory / record_file_name(identity.key), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, header + page)
        os.close(fd)


def _raw_reads(directory: Path) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            fd = os.open(entry.path, os.O_RDONLY)
            os.pread(fd, 4096, 0)
            os.close(fd)


def _timed(name: str, action: Callable[[], object]) -> None:
    start = time.perf_counter()
    action()
    print(f"{name:32} {time.perf_counter() - start:6.2f} s", flush=True)


def main() -> None:
    """Write, scan, print, remove."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--num-records", type=int, default=100_000)
    arguments.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    options = arguments.parse_args()
    path = Path(tempfile.mkdtemp(prefix="flare-records-", dir=options.directory))
    geometry = small_geometry()
    try:
        _timed("write", lambda: write_records(path, options.num_records, geometry=geometry))
        directory = RecordDirectory.open(path)

        def scan() -> None:
            scan_directory(directory, geometry=geometry, set_fingerprint=SET_FINGERPRINT, with_token_ids=True)

        _timed("raw reads, warm", lambda: _raw_reads(path))
        _timed("scan, warm", scan)
        found = scan_directory(directory, geometry=geometry, set_fingerprint=SET_FINGERPRINT, with_token_ids=True)
        if can_drop_page_cache():
            os.sync()
            drop_page_cache()
            _timed("raw reads, cold", lambda: _raw_reads(path))
            drop_page_cache()
            _timed("scan, cold", scan)
        save_join_index(directory, found.records, geometry=geometry, set_fingerprint=SET_FINGERPRINT)
        _timed("scan, warm, join.idx", scan)
        if can_drop_page_cache():
            os.sync()
            drop_page_cache()
            _timed("scan, cold, join.idx", scan)
        directory.close()
    finally:
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
