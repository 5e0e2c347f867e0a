"""Is an object a sound shard? Header, set, rank, record, extent, and every section's digest. Works on bytes."""

from __future__ import annotations

from flare_cache.digest import ROW_INDEX, section_digest
from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.core_words import ShardFacts
from flare_cache.pool.shard_source import extent_bytes
from flare_cache.record import Problem, RecordError, RecordHeader, decode_header
from flare_cache.transfer import check_same_record

__all__ = ["check_shard"]

_DIGEST_BYTES = 32


def check_shard(
    data: memoryview,
    *,
    record: RecordIdentity,
    extent: Extent,
    set_fingerprint: bytes | None,
    rank: int,
    world_size: int,
) -> ShardFacts:
    """What the shard in ``data`` says of itself, every byte of it verified. Blocks for reading it once.

    ``set_fingerprint``: None where only the record is known.

    Raises:
        RecordError: what is wrong with it.
    """
    header = decode_header(data)
    if set_fingerprint is not None and header.set_fingerprint != set_fingerprint:
        raise RecordError(Problem.OTHER_SET, f"set {header.set_fingerprint.hex()[:16]}")
    if (header.rank, header.world_size) != (rank, world_size):
        raise RecordError(Problem.OTHER_RANK, f"rank {header.rank} of {header.world_size}")
    check_same_record(header.identity, record)
    layout = header.layout
    if len(data) != extent_bytes(layout, extent):
        raise RecordError(Problem.TRUNCATED, f"{len(data)} bytes are no shard with its {extent}")
    _check_sections(data, header)
    return ShardFacts(
        record=record,
        extent=extent,
        token_ids=header.token_ids,
        invariant_digest=header.invariant_digest,
        num_bytes=len(data),
        header_digest=bytes(data[layout.header_bytes - _DIGEST_BYTES : layout.header_bytes]),
    )


def _check_sections(data: memoryview, header: RecordHeader) -> None:
    """Compare the digests of all sections that are there."""
    layout = header.layout
    num_sections = layout.num_pages + (1 if layout.has_tail and len(data) >= layout.tail_end else 0)
    places = [(index, index, layout.section_offset(index), layout.page_bytes) for index in range(num_sections)]
    if layout.has_row and len(data) >= layout.row_end:
        places.append((ROW_INDEX, layout.num_digests - 1, layout.tail_end, layout.row_end - layout.tail_end))
    for index, position, offset, size in places:
        found = section_digest(
            header.identity.store_id, header.rank, index=index, payload=[data[offset : offset + size]]
        )
        if found != header.digest_at(position):
            name = "the row" if index == ROW_INDEX else f"section {index}"
            raise RecordError(Problem.SECTION_DIGEST, name)
