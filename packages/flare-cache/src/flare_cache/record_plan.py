"""From a computed prefix to the chain of records that is still missing in one tier. Pure.

A record holds at most so many sections that its file stays within the record bound on the largest rank, and its
header within the header bound. A row given with the prefix goes into the last record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flare_cache.index import Record, RecordIndex
from flare_cache.jobs import RecordIdentity, Section
from flare_cache.record import MAX_HEADER_BYTES, file_layout
from flare_core.geometry import Geometry
from flare_core.keys import next_key
from flare_core.prefix import StoreRequest

__all__ = [
    "DEFAULT_RECORD_BYTES",
    "FileSizes",
    "PlannedRecord",
    "RecordBounds",
    "Replacement",
    "new_record",
    "plan_replacement",
    "plan_store",
    "record_bounds",
]

DEFAULT_RECORD_BYTES = 256 << 20
# What a header spends on a section beside its token ids: digest, offset and length, with room to spare.
_HEADER_SECTION_BYTES = 64
_HEADER_FIXED_BYTES = 8192


@dataclass(frozen=True, slots=True)
class RecordBounds:
    """What records of this group may be.

    Attributes:
        page_tokens: tokens of a whole page.
        max_sections: sections of one record.
        min_tail_tokens: shorter tails are not stored, unless a row needs them.
    """

    page_tokens: int
    max_sections: int
    min_tail_tokens: int

    @property
    def record_tokens(self) -> int:
        """Tokens of a full record: where the scheduler cuts prefill chunks for models with rows."""
        return self.max_sections * self.page_tokens


def record_bounds(
    geometries: Sequence[Geometry], *, min_tail_tokens: int, max_record_bytes: int = DEFAULT_RECORD_BYTES
) -> RecordBounds:
    """The bounds that ``max_record_bytes``, on the rank with the largest pages, and the header's limit allow."""
    page_tokens = geometries[0].page_tokens
    by_file = min(
        (max_record_bytes - MAX_HEADER_BYTES - geometry.row_stride) // geometry.page_bytes for geometry in geometries
    )
    by_header = (MAX_HEADER_BYTES - _HEADER_FIXED_BYTES) // (4 * page_tokens + _HEADER_SECTION_BYTES)
    return RecordBounds(page_tokens, max(1, min(by_file, by_header)), min_tail_tokens)


class FileSizes:
    """Bytes that a record takes on the rank where its file is largest."""

    def __init__(self, geometries: Sequence[Geometry]) -> None:
        # Ranks often have equal pages and rows; each pair of sizes is computed once.
        self._strides = tuple({(geometry.page_bytes, geometry.row_stride) for geometry in geometries})
        # A size follows from few numbers, and few combinations of them occur.
        self._known: dict[tuple[int, int, bool, bool, bool], int] = {}

    def largest(self, identity: RecordIdentity, *, has_tail: bool, has_row: bool) -> int:
        """Size of the file when only this much is left of the tail and row that ``identity`` names."""
        shape = (identity.end - identity.start, identity.tail_tokens, identity.has_row, has_tail, has_row)
        size = self._known.get(shape)
        if size is None:
            size = self._known[shape] = self._compute(identity, has_tail=has_tail, has_row=has_row)
        return size

    def _compute(self, identity: RecordIdentity, *, has_tail: bool, has_row: bool) -> int:
        sizes: list[int] = []
        for page_bytes, row_stride in self._strides:
            layout = file_layout(identity, page_bytes=page_bytes, row_stride=row_stride)
            sizes.append(layout.row_end if has_row else layout.tail_end if has_tail else layout.pages_end)
        return max(sizes)


@dataclass(frozen=True, slots=True)
class PlannedRecord:
    """A record to store: who it is, and which device pages and row slot it is copied from."""

    identity: RecordIdentity
    token_ids: bytes
    sections: tuple[Section, ...]
    row_slot: int | None


@dataclass(frozen=True, slots=True)
class Replacement:
    """``planned`` takes the name of ``replaced``, a cut record, once that is unlinked."""

    replaced: Record
    planned: PlannedRecord


def plan_store(
    request: StoreRequest, index: RecordIndex, bounds: RecordBounds, *, draw_store_id: Callable[[], bytes]
) -> list[PlannedRecord]:
    """The records that ``index`` lacks of ``request``, parents first; empty when there is nothing to do.

    A tail is stored when it is long enough, or needed by a row, and no page or tail begins with its tokens already.
    """
    num_whole = len(request.keys)
    num_present = index.num_present(request.keys)
    has_tail = _wants_tail(request, index, bounds, num_present)
    num_sections = num_whole - num_present + (1 if has_tail else 0)
    if num_sections == 0:
        if request.row_slot is None or num_whole == 0 or index.get(request.keys[-1]) is not None:
            return []
        # The row's place is inside a record: its last page is stored once more, so that a record ends there.
        num_present, num_sections = num_present - 1, 1
    parent = index.holder(request.keys[num_present - 1]) if num_present else None
    planned: list[PlannedRecord] = []
    parent_key = parent.key if parent is not None else b""
    for first in range(0, num_sections, bounds.max_sections):
        last = min(first + bounds.max_sections, num_sections)
        record = _record(
            request,
            bounds,
            first=num_present + first,
            last=num_present + last,
            parent_key=parent_key,
            has_row=request.row_slot is not None and last == num_sections,
            store_id=draw_store_id(),
        )
        if index.get(record.identity.key) is not None:
            # A record of this name is on its way out, or was cut: nothing can be stored beside it.
            break
        planned.append(record)
        parent_key = record.identity.key
    return planned


def plan_replacement(
    request: StoreRequest, index: RecordIndex, bounds: RecordBounds, *, draw_store_id: Callable[[], bytes]
) -> Replacement | None:
    """The record that ends where ``request`` does, whole again, if it lost a tail or row that ``request`` brings.

    For a request of which :func:`plan_store` found nothing to store. A record that a transfer uses, or that others
    extend, stays as it is.
    """
    num_whole = len(request.keys)
    has_tail = _wants_tail(request, index, bounds, num_whole)
    end_key = _boundary(request, num_whole)
    if has_tail:
        end_key = next_key(end_key, request.token_ids[num_whole * bounds.page_tokens :])
    cut = index.get(end_key)
    if cut is None or not (cut.is_stored and cut.is_usable) or cut.num_pins or cut.children:
        return None
    lacks_row = request.row_slot is not None and not cut.has_row
    lacks_tail = has_tail and not cut.tail_tokens
    last = num_whole + (1 if has_tail else 0)
    if not (lacks_row or lacks_tail) or last - cut.first_page > bounds.max_sections:
        return None
    planned = _record(
        request,
        bounds,
        first=cut.first_page,
        last=last,
        parent_key=cut.identity.parent_key,
        has_row=request.row_slot is not None,
        store_id=draw_store_id(),
    )
    return Replacement(cut, planned)


def new_record(planned: PlannedRecord, parent: Record | None, num_bytes: int) -> Record:
    """The index's entry for a planned record, not stored yet."""
    identity = planned.identity
    return Record(
        identity,
        planned.token_ids,
        num_bytes,
        tail_tokens=identity.tail_tokens,
        has_row=identity.has_row,
        parent=parent,
    )


def _wants_tail(request: StoreRequest, index: RecordIndex, bounds: RecordBounds, num_present: int) -> bool:
    num_whole = len(request.keys)
    start = num_whole * bounds.page_tokens
    num_tokens = len(request.token_ids) - start
    if request.tail_page is None or num_tokens == 0:
        return False
    if request.row_slot is not None:
        return True
    if num_tokens < bounds.min_tail_tokens:
        return False
    if num_present < num_whole:
        return True
    run = index.longest_run(_boundary(request, num_whole), num_whole, request.token_ids[start:].tobytes())
    return run is None or run.num_tokens < num_tokens


def _record(
    request: StoreRequest,
    bounds: RecordBounds,
    *,
    first: int,
    last: int,
    parent_key: bytes,
    has_row: bool,
    store_id: bytes,
) -> PlannedRecord:
    """The record of sections [first, last) of the sequence; a section behind the whole pages is the tail."""
    num_whole = len(request.keys)
    page_tokens = bounds.page_tokens
    end = min(last * page_tokens, len(request.token_ids))
    tail_tokens = end - num_whole * page_tokens if last > num_whole else 0
    key = _boundary(request, min(last, num_whole))
    if tail_tokens:
        key = next_key(key, request.token_ids[num_whole * page_tokens : end])
    pages = [*request.pages[first : min(last, num_whole)]]
    if tail_tokens and request.tail_page is not None:
        pages.append(request.tail_page)
    identity = RecordIdentity(
        key=key,
        store_id=store_id,
        parent_key=parent_key,
        start_key=_boundary(request, first),
        start=first * page_tokens,
        end=end,
        page_tokens=page_tokens,
        tail_tokens=tail_tokens,
        has_row=has_row,
    )
    return PlannedRecord(
        identity=identity,
        token_ids=request.token_ids[first * page_tokens : end].tobytes(),
        sections=tuple(Section(index, page) for index, page in enumerate(pages)),
        row_slot=request.row_slot if has_row else None,
    )


def _boundary(request: StoreRequest, num_pages: int) -> bytes:
    return request.keys[num_pages - 1] if num_pages else request.root
