"""What a rank's directory contributes to the join, and what an agreed set does to it. Blocking file calls.

Only what this format wrote for this set is removed or truncated. Files are named from the rank's own scan, never from
a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flare_cache.directory import RecordDirectory
from flare_cache.jobs import record_file_name
from flare_cache.join_messages import Applied
from flare_cache.join_set import KEEP_ROW, KEEP_TAIL, Verdict
from flare_cache.record import file_layout
from flare_cache.scan import Scan, ScannedRecord
from flare_cache.set_file import check_set_file, new_set_file
from flare_cache.settings import CacheSettings, Statement
from flare_core.geometry import Geometry
from flare_transport.failpoint import failpoint

__all__ = ["apply_verdicts", "make_statement"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
        file_system=f"{_BOOT_ID.read_text().strip()}/{directory.file_system()}",
        directory=str(directory.path),
        set_id=bytes.fromhex(set_file.set_id) if set_file is not None else b"",
        record_bytes=sum(record.size for record in scan.records),
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

    Raises:
        UsageError: ``set.json`` cannot be written.
        OSError: a file cannot be removed or cut; what was done stays done, and the next join goes on from there.
        RecordError: a file went, or changed into something else, since the scan.
    """
    expected = new_set_file(settings.identity, geometry.rank, set_id=set_id, salt_key_id=settings.salt_key_id)
    if directory.read_set() != expected:
        failpoint("join.write-set")
        directory.adopt(expected)
    for file in scan.damaged:
        directory.remove(file.name)
    judged = list(zip(scan.records, verdicts, strict=True))
    dropped = [record for record, verdict in judged if verdict & 0x0F != Verdict.KEPT]
    for record in sorted(dropped, key=lambda one: -one.identity.start):
        directory.remove(record_file_name(record.identity.key))
    num_truncated = _truncate(directory, judged, geometry)
    return Applied(num_truncated, len(scan.damaged), len(scan.left))


def _truncate(directory: RecordDirectory, judged: Sequence[tuple[ScannedRecord, int]], geometry: Geometry) -> int:
    num_truncated = 0
    for record, verdict in judged:
        identity = record.identity
        has_tail, has_row = bool(verdict & KEEP_TAIL), bool(verdict & KEEP_ROW)
        is_whole = has_tail == bool(identity.tail_tokens) and has_row == identity.has_row
        if verdict & 0x0F != Verdict.KEPT or is_whole:
            continue
        layout = file_layout(identity, page_bytes=geometry.page_bytes, row_stride=geometry.row_stride)
        size = layout.row_end if has_row else layout.tail_end if has_tail else layout.pages_end
        # Also where the scan counted a torn size as the lower one: what lies behind it goes now.
        directory.truncate(record_file_name(identity.key), size)
        num_truncated += 1 if size < record.size else 0
    return num_truncated
