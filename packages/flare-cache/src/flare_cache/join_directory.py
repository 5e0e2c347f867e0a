"""What a rank's directory contributes to the join, and what an agreed set does to it. Blocking file calls.

Only what this format wrote for this set is removed or truncated. Files are named from the rank's own scan, never from
a message.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flare_cache.directory import RecordDirectory
from flare_cache.disk_shelf import Durability
from flare_cache.header_columns import file_ends
from flare_cache.jobs import record_file_name
from flare_cache.join_messages import Applied
from flare_cache.join_set import FATE_MASK, Verdict
from flare_cache.record_table import KEEP_ROW, KEEP_TAIL, RecordTable
from flare_cache.scan import Scan
from flare_cache.set_file import check_set_file, new_set_file
from flare_cache.settings import CacheSettings, Statement
from flare_core.geometry import Geometry
from flare_transport.failpoint import failpoint

__all__ = ["apply_verdicts", "make_statement"]


def make_statement(
    settings: CacheSettings, geometry: Geometry, directory: RecordDirectory | None, scan: Scan | None
) -> Statement:
    """What this rank says of itself. ``directory`` and its ``scan`` are None without a disk tier.

    Raises:
        UsageError: ``set.json`` cannot be read, or says that the directory is another rank's or another set's.
        OSError: the file system cannot be asked for its free space.
    """
    rank = geometry.rank
    fields, layout = settings.fields(), geometry.layout_fingerprint
    if directory is None or scan is None:
        return Statement(rank=rank, fields=fields, layout=layout, memory_bytes=settings.memory_bytes or 0)
    set_file = directory.read_set()
    if set_file is not None:
        expected = new_set_file(settings.identity, rank, set_id=b"", salt_key_id=settings.salt_key_id)
        check_set_file(set_file, expected, str(directory.path))
    return Statement(
        rank=rank,
        fields=fields,
        layout=layout,
        memory_bytes=settings.memory_bytes or 0,
        disk_limit_bytes=settings.disk_limit_bytes or 0,
        free_bytes=directory.free_bytes(),
        file_system=directory.file_system(),
        directory=str(directory.path),
        set_id=bytes.fromhex(set_file.set_id) if set_file is not None else b"",
        record_bytes=int(scan.records.sizes.sum()),
        left_bytes=sum(file.size for file in scan.left),
        num_records=len(scan.records),
    )


def apply_verdicts(
    directory: RecordDirectory,
    scan: Scan,
    verdicts: bytes,
    *,
    set_id: bytes,
    settings: CacheSettings,
    geometry: Geometry,
) -> Applied:
    """Write ``set.json`` if it says something else, unlink what is not kept, leaves first, truncate what others lack.

    Where records are to outlive a power cut, the names of what stays are durable then: a process that died in the
    middle of a store may have left a record whole whose name is not.

    Raises:
        UsageError: ``set.json`` cannot be written.
        OSError: a file cannot be removed or cut, or the directory not be synced; what was done stays done, and the
            next join goes on from there.
        RecordError: a file went, or changed into something else, since the scan.
    """
    expected = new_set_file(settings.identity, geometry.rank, set_id=set_id, salt_key_id=settings.salt_key_id)
    if directory.read_set() != expected:
        failpoint("join.write-set")
        directory.adopt(expected)
    for file in scan.damaged:
        directory.remove(file.name)
    fates = np.frombuffer(verdicts, dtype=np.uint8)
    dropped = scan.records.taken(np.flatnonzero(fates & FATE_MASK != Verdict.KEPT)).identities
    for key in dropped["key"][np.argsort(-dropped["start"], kind="stable")].tolist():
        directory.remove(record_file_name(key))
    num_truncated = _truncate(directory, scan.records, fates, geometry)
    if settings.durability is Durability.POWER:
        directory.sync()
    return Applied(num_truncated, len(scan.damaged), len(scan.left))


def _truncate(directory: RecordDirectory, records: RecordTable, verdicts: NDArray[np.uint8], geometry: Geometry) -> int:
    """Cut what stays, but not whole as it was stored; how many files became smaller than the scan counted them."""
    stored = np.where(records.identities["tail_tokens"] > 0, KEEP_TAIL, 0) | np.where(
        records.has_row_stored, KEEP_ROW, 0
    )
    places = np.flatnonzero((verdicts & FATE_MASK == Verdict.KEPT) & (verdicts != stored))
    cut, parts = records.taken(places), verdicts[places]
    ends = file_ends(cut.identities, geometry)
    has_tail, has_row = parts & KEEP_TAIL != 0, parts & KEEP_ROW != 0
    sizes = np.where(has_row, ends.row_end, np.where(has_tail, ends.tail_end, ends.pages_end))
    for key, size in zip(cut.identities["key"].tolist(), sizes.tolist(), strict=True):
        # Also where the scan counted a torn size as the lower one: what lies behind it goes now.
        directory.truncate(record_file_name(key), size)
    return int((sizes < cut.sizes).sum())
