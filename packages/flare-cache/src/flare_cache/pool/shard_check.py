"""Is an object a sound shard? Header, set, rank, record, extent, and every section's digest. Works on bytes.

A shard on its way is checked as it comes: a section is digested when the last of its bytes has arrived, while it is
still in a cache, so that little is left to do when the last section has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from flare_cache.digest import ROW_INDEX, section_digest
from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.core_words import ShardFacts
from flare_cache.pool.shard_source import extent_bytes
from flare_cache.record import Problem, RecordError, RecordHeader, decode_header
from flare_cache.transfer import check_same_record

__all__ = ["ShardCheck", "check_shard"]

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Section:
    index: int
    position: int
    start: int
    end: int


@dataclass(slots=True)
class ShardCheck:
    """The check of one shard whose bytes arrive in ``data``, in any order, each once. Thread-safe.

    Attributes:
        data: as long as the shard.
        record, extent, rank, world_size: what it must be.
        set_fingerprint: likewise; None where only the record is known.
    """

    data: memoryview
    record: RecordIdentity
    extent: Extent
    set_fingerprint: bytes | None
    rank: int
    world_size: int
    _header: RecordHeader | None = None
    _pending: list[_Section] = field(default_factory=list)
    _arrived: list[tuple[int, int]] = field(default_factory=list)
    _problem: RecordError | None = None
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def arrived(self, offset: int, num_bytes: int) -> None:
        """So many bytes are there, and change no more. Blocks for reading the sections that are whole now."""
        with self._mutex:
            self._arrived = _merged(self._arrived, (offset, offset + num_bytes))
            if self._header is None and self._arrived[0][0] == 0:
                # Not whole yet, or bad: told at the end.
                with contextlib.suppress(RecordError):
                    self._take_header(self._arrived[0][1])
            due = [section for section in self._pending if _covers(self._arrived, section)]
            self._pending = [section for section in self._pending if not _covers(self._arrived, section)]
        self._digest(due)

    def finish(self) -> ShardFacts:
        """All bytes have arrived: what the shard says of itself. Blocks for what was not checked yet.

        Raises:
            RecordError: what is wrong with it.
        """
        header = self._header or self._take_header(len(self.data))
        self._digest(self._pending)
        if self._problem is not None:
            raise self._problem
        header_bytes = header.layout.header_bytes
        return ShardFacts(
            record=self.record,
            extent=self.extent,
            token_ids=header.token_ids,
            invariant_digest=header.invariant_digest,
            num_bytes=len(self.data),
            header_digest=bytes(self.data[header_bytes - _DIGEST_BYTES : header_bytes]),
        )

    def _take_header(self, num_bytes: int) -> RecordHeader:
        """The header, if it lies in the first ``num_bytes`` and is this shard's: only then it is believed.

        What lies behind may be anything: zeros, or another shard whose buffer this was. Raises RecordError.
        """
        header = decode_header(self.data[:num_bytes])
        if self.set_fingerprint is not None and header.set_fingerprint != self.set_fingerprint:
            raise RecordError(Problem.OTHER_SET, f"set {header.set_fingerprint.hex()[:16]}")
        if (header.rank, header.world_size) != (self.rank, self.world_size):
            raise RecordError(Problem.OTHER_RANK, f"rank {header.rank} of {header.world_size}")
        check_same_record(header.identity, self.record)
        if len(self.data) != extent_bytes(header.layout, self.extent):
            raise RecordError(Problem.TRUNCATED, f"{len(self.data)} bytes are no shard with its {self.extent}")
        self._header, self._pending = header, _sections(header, len(self.data))
        return header

    def _digest(self, sections: Sequence[_Section]) -> None:
        header = self._header
        for section in sections:
            assert header is not None  # noqa: S101 - sections are the header's
            payload = [self.data[section.start : section.end]]
            found = section_digest(header.identity.store_id, header.rank, index=section.index, payload=payload)
            if found != header.digest_at(section.position):
                name = "the row" if section.index == ROW_INDEX else f"section {section.index}"
                self._problem = RecordError(Problem.SECTION_DIGEST, name)


def check_shard(
    data: memoryview,
    *,
    record: RecordIdentity,
    extent: Extent,
    set_fingerprint: bytes | None,
    rank: int,
    world_size: int,
) -> ShardFacts:
    """What the whole shard in ``data`` says of itself, every byte of it verified. Blocks for reading it once.

    Raises:
        RecordError: what is wrong with it.
    """
    return ShardCheck(data, record, extent, set_fingerprint, rank, world_size).finish()


def _sections(header: RecordHeader, num_bytes: int) -> list[_Section]:
    """Those that are there."""
    layout = header.layout
    count = layout.num_pages + (1 if layout.has_tail and num_bytes >= layout.tail_end else 0)
    starts = [layout.section_offset(index) for index in range(count)]
    sections = [_Section(index, index, start, start + layout.page_bytes) for index, start in enumerate(starts)]
    if layout.has_row and num_bytes >= layout.row_end:
        sections.append(_Section(ROW_INDEX, layout.num_digests - 1, layout.tail_end, layout.row_end))
    return sections


def _merged(ranges: list[tuple[int, int]], added: tuple[int, int]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch made one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted([*ranges, added]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _covers(ranges: list[tuple[int, int]], section: _Section) -> bool:
    return any(start <= section.start and section.end <= end for start, end in ranges)
