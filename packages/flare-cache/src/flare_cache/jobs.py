"""The words of the record path: a record's identity, a job on it, and what became of the job on one rank.

A job stores, fetches, truncates or unlinks one record on every rank, or puts it into the pool. Rank zero plans it and
sends the same job to all; each rank derives the file name from the key, checks the job against its own geometry and
runs it on its own staged transport. Nothing here does I/O.
"""

from __future__ import annotations

import enum

import msgspec

from flare_core.prefix import Tier

__all__ = ["Extent", "Job", "JobOp", "JobResult", "JobStatus", "RecordIdentity", "Section", "record_file_name"]


class JobOp(enum.StrEnum):
    """What is done to a record."""

    STORE = "store"
    FETCH = "fetch"
    TRUNCATE = "truncate"
    UNLINK = "unlink"
    PUT = "put"


class Extent(enum.StrEnum):
    """How much of a record its shards in the pool hold: a record may have been truncated before it was put."""

    PAGES = "pages"
    TAIL = "tail"
    ROW = "row"


class RecordIdentity(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """The rank-invariant part of a record, without its token ids: equal on every rank that holds the record.

    A truncation changes what the file holds, never the identity: jobs on a truncated record name it as stored.

    Attributes:
        key: chain key at the record's end (a partial last page keyed with its own count); names the file. 32 bytes.
        store_id: drawn by rank zero for each store, so that shards of two computations are never joined. 16 bytes.
        parent_key: key of the record that this one extends; empty at the root.
        start_key: chain key at ``start`` (the root key for start 0). 32 bytes.
        start, end: token positions; ``start`` is a multiple of ``page_tokens``.
        page_tokens: tokens of a whole page.
        tail_tokens: tokens of the partial page, 0 without one; (end - start - tail_tokens) / page_tokens whole pages.
        has_row: a row follows the pages and the tail.
    """

    key: bytes
    store_id: bytes
    parent_key: bytes
    start_key: bytes
    start: int
    end: int
    page_tokens: int
    tail_tokens: int
    has_row: bool

    @property
    def num_pages(self) -> int:
        """Whole pages."""
        return (self.end - self.start - self.tail_tokens) // self.page_tokens

    @property
    def num_sections(self) -> int:
        """Whole pages and the tail; the tail, if any, is section ``num_pages``."""
        return self.num_pages + (1 if self.tail_tokens else 0)


class Section(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Section ``index`` of a record's file from or to device page ``page``."""

    index: int
    page: int


class Job(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """One transfer on every rank.

    Attributes:
        job_id: strictly rising within a run. Jobs that name the same record, page or slot run in this order.
        op: what to do.
        tier: DISK, MEMORY or, FETCH and PUT only, POOL: where the record lives, or is to go.
        record: identity. All but STORE expect a record with this key and store id.
        after_step: the rank starts its copy only after this step has finished on its device.
        sections: STORE: all sections in order, with the pages they come from. FETCH: those wanted. Else empty.
        row_slot: STORE and FETCH: slot of the row; None: the row takes no part.
        token_ids: STORE only: ids of [start, end), u32 little endian.
        keep_tail: TRUNCATE: keep the tail and drop only the row. The row goes in any case.
        pool_session: POOL: the session that the ranks agreed on, 16 bytes; a rank in another one answers a miss.
        extent: POOL: what the shards hold.
    """

    job_id: int
    op: JobOp
    tier: Tier
    record: RecordIdentity
    after_step: int = 0
    sections: tuple[Section, ...] = ()
    row_slot: int | None = None
    token_ids: bytes = b""
    keep_tail: bool = False
    pool_session: bytes = b""
    extent: Extent = Extent.ROW


class JobStatus(enum.StrEnum):
    """What became of a job on one rank.

    OK: done. FAILED: not done, and nothing of it is visible on this rank (a failed STORE has removed what it wrote);
    the reason says why. BAD_RECORD: a FETCH found the record missing, foreign, or a check or read of it failed.
    UNCLEAN: a failed STORE could not remove what it wrote.
    """

    OK = "ok"
    FAILED = "failed"
    BAD_RECORD = "bad-record"
    UNCLEAN = "unclean"


class JobResult(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's answer to a job; what an acknowledgement frame carries (the frame adds run id and rank).

    Attributes:
        num_bytes: bytes moved; for STORE the size of the file.
        reason: one short line where the status is not OK.
    """

    job_id: int
    status: JobStatus
    num_bytes: int = 0
    reason: str = ""


def record_file_name(key: bytes) -> str:
    """The file name of a record, the same on every rank; made locally, never taken from a frame."""
    return f"{key.hex()}.rec"
