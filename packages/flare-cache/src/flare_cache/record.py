"""The format of a record's file: sizes, header codec, and what can be wrong with it (docs/record-format.md).

A file is a header, whole pages, at most one tail page and at most one row, each padded to 4096 bytes. The header
has a rank-invariant part, equal on every rank, a rank-bound part, and ends with a SHA-256 of all of it. This module
works on bytes; it opens no file.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import ClassVar

import msgspec

from flare_cache.digest import DIGEST_BYTES
from flare_cache.jobs import RecordIdentity
from flare_core.errors import FlareError
from flare_core.geometry import Geometry, align_up

__all__ = [
    "BLOCK_BYTES",
    "FORMAT",
    "MAGIC",
    "MAX_HEADER_BYTES",
    "FileLayout",
    "Problem",
    "RecordError",
    "RecordHeader",
    "check_header",
    "claimed_set",
    "decode_header",
    "encode_header",
    "file_layout",
    "header_length",
    "identity_problem",
    "rank_invariant_digest",
]

MAGIC = b"FLAREREC"
FORMAT = 1
MIN_READER = 1
BLOCK_BYTES = 4096
MAX_HEADER_BYTES = 1 << 20
MAX_TOKENS = 1 << 40
MAX_PAGE_TOKENS = 1 << 20

HAS_ROW = 1
HAS_PARENT = 2
DIGEST_XXH3_128 = 1
SHA256_BYTES = 32

PREFIX = struct.Struct("<8sHHI")
INVARIANT = struct.Struct("<8sHHI32s32s16s32s32sQQIII4x")
BOUND = struct.Struct("<32sIIQQQQQQQII")
TOKENS_AT = INVARIANT.size
BOUND_ALIGNMENT = 64
NO_KEY = bytes(32)


class Problem(enum.StrEnum):
    """What is wrong with a record's file."""

    MISSING = "missing"
    TRUNCATED = "truncated"
    NOT_A_RECORD = "not-a-record"
    NEWER_FORMAT = "newer-format"
    HEADER_DIGEST = "header-digest"
    INCONSISTENT = "inconsistent-header"
    OTHER_SET = "other-set"
    OTHER_RANK = "other-rank"
    OTHER_LAYOUT = "other-layout"
    OTHER_RECORD = "other-record"
    SECTION_DIGEST = "section-digest"
    READ_ERROR = "read-error"


class RecordError(FlareError):
    """A record that cannot be used; ``problem`` is the fact, the message adds the values."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problem: Problem, detail: str) -> None:
        super().__init__(f"{problem}: {detail}")
        self.problem = problem


class FileLayout(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """Where the parts of one rank's file lie; all multiples of 4096 bytes.

    Attributes:
        header_bytes: length of the header; the pages begin here.
        page_bytes: length of a page and of the tail.
        num_pages: whole pages.
        pages_end, tail_end, row_end: the legal sizes; equal where there is no tail or no row.
    """

    header_bytes: int
    page_bytes: int
    num_pages: int
    pages_end: int
    tail_end: int
    row_end: int

    @property
    def has_tail(self) -> bool:
        """A tail was written (a truncation may have dropped it)."""
        return self.tail_end > self.pages_end

    @property
    def has_row(self) -> bool:
        """A row was written (a truncation may have dropped it)."""
        return self.row_end > self.tail_end

    @property
    def num_digests(self) -> int:
        """Sections with a digest: pages, tail, row."""
        return self.num_pages + self.has_tail + self.has_row

    def section_offset(self, index: int) -> int:
        """File offset of section ``index``; the tail is section ``num_pages``."""
        return self.header_bytes + index * self.page_bytes

    def legal_size(self, size: int) -> int | None:
        """The size that a file of ``size`` bytes counts as: the largest legal one not above it; None: invalid."""
        for legal in (self.row_end, self.tail_end, self.pages_end):
            if size >= legal:
                return legal
        return None


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A decoded header.

    Attributes:
        set_fingerprint: the record set.
        identity: the rank-invariant fields, as stored; a truncation does not change them.
        token_ids: ids of [start, end), u32 little endian.
        layout_fingerprint: geometry of the rank that wrote the file.
        rank, world_size: who wrote it.
        layout: where its sections lie.
        digests: 16 bytes for each page, the tail and the row, in this order.
        invariant_digest: SHA-256 of the rank-invariant part; what ranks compare.
        format: the format it was written in.
    """

    set_fingerprint: bytes
    identity: RecordIdentity
    token_ids: bytes
    layout_fingerprint: bytes
    rank: int
    world_size: int
    layout: FileLayout
    digests: bytes
    invariant_digest: bytes
    format: int = FORMAT

    def digest_at(self, position: int) -> bytes:
        """Digest of the section at ``position`` in the order pages, tail, row."""
        return self.digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]


def identity_problem(identity: RecordIdentity) -> str | None:
    """Why these fields cannot be a record's, or None. Bounds every number that a size is computed from."""
    lengths = (len(identity.key), len(identity.store_id), len(identity.start_key))
    if lengths != (32, 16, 32) or len(identity.parent_key) not in (0, 32):
        return "a key, store id or parent key has the wrong length"
    num_tokens = identity.end - identity.start
    if not 0 <= identity.start < identity.end <= MAX_TOKENS or num_tokens > MAX_HEADER_BYTES // 4:
        return f"token range [{identity.start}, {identity.end}) is empty or too long"
    page_tokens, tail_tokens = identity.page_tokens, identity.tail_tokens
    if not 1 <= page_tokens <= MAX_PAGE_TOKENS or not 0 <= tail_tokens < page_tokens:
        return f"{tail_tokens} tail tokens in pages of {page_tokens}"
    if identity.start % page_tokens or (num_tokens - tail_tokens) % page_tokens:
        return f"[{identity.start}, {identity.end}) is not whole pages of {page_tokens} and a tail of {tail_tokens}"
    return None


def _bound_at(num_tokens: int) -> int:
    return align_up(TOKENS_AT + 4 * num_tokens, BOUND_ALIGNMENT)


def file_layout(identity: RecordIdentity, *, page_bytes: int, row_stride: int) -> FileLayout:
    """Sizes of the file of ``identity`` on a rank with these page bytes and row stride (multiples of 4096).

    ``identity`` has been checked with :func:`identity_problem`.
    """
    num_pages = identity.num_pages
    num_digests = identity.num_sections + identity.has_row
    content = _bound_at(identity.end - identity.start) + BOUND.size + DIGEST_BYTES * num_digests + SHA256_BYTES
    header_bytes = align_up(content, BLOCK_BYTES)
    pages_end = header_bytes + num_pages * page_bytes
    tail_end = pages_end + (page_bytes if identity.tail_tokens else 0)
    return FileLayout(
        header_bytes=header_bytes,
        page_bytes=page_bytes,
        num_pages=num_pages,
        pages_end=pages_end,
        tail_end=tail_end,
        row_end=tail_end + (row_stride if identity.has_row else 0),
    )


def rank_invariant_digest(header: bytes | memoryview, num_tokens: int) -> bytes:
    """SHA-256 of the part of an encoded header that is equal on every rank: what ranks compare at join."""
    return hashlib.sha256(memoryview(header)[: TOKENS_AT + 4 * num_tokens]).digest()


def encode_header(
    identity: RecordIdentity,
    token_ids: bytes,
    *,
    set_fingerprint: bytes,
    geometry: Geometry,
    digests: bytes,
) -> bytes:
    """The header of one rank's file, padded and with its SHA-256.

    Raises:
        ValueError: fields that contradict each other, or a header above 1 MiB; a caller's mistake.
    """
    problem = identity_problem(identity)
    if problem is not None:
        raise ValueError(problem)
    layout = file_layout(identity, page_bytes=geometry.page_bytes, row_stride=geometry.row_stride)
    num_tokens = identity.end - identity.start
    if layout.header_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {layout.header_bytes} bytes is over the limit of {MAX_HEADER_BYTES}")
    if len(token_ids) != 4 * num_tokens or len(digests) != DIGEST_BYTES * layout.num_digests:
        raise ValueError(f"{len(token_ids)} bytes of token ids, {len(digests)} of digests do not fit the identity")
    header = bytearray(layout.header_bytes)
    flags = (HAS_ROW if identity.has_row else 0) | (HAS_PARENT if identity.parent_key else 0)
    INVARIANT.pack_into(
        header, 0, MAGIC, FORMAT, MIN_READER, layout.header_bytes, set_fingerprint, identity.key, identity.store_id,
        identity.parent_key or NO_KEY, identity.start_key, identity.start, identity.end, identity.page_tokens,
        identity.tail_tokens, flags,
    )  # fmt: skip
    header[TOKENS_AT : TOKENS_AT + len(token_ids)] = token_ids
    at = _bound_at(num_tokens)
    BOUND.pack_into(
        header, at, geometry.layout_fingerprint, geometry.rank, geometry.world_size, layout.header_bytes,
        layout.page_bytes, layout.pages_end, layout.tail_end - layout.pages_end, layout.tail_end,
        layout.row_end - layout.tail_end, layout.row_end, layout.num_pages, DIGEST_XXH3_128,
    )  # fmt: skip
    header[at + BOUND.size : at + BOUND.size + len(digests)] = digests
    header[-SHA256_BYTES:] = hashlib.sha256(memoryview(header)[:-SHA256_BYTES]).digest()
    return bytes(header)


def header_length(first: bytes | memoryview) -> int:
    """Length of the header that begins with ``first`` (at least 16 bytes of it); at most 1 MiB.

    The first 16 bytes keep their meaning in every format.

    Raises:
        RecordError: TRUNCATED, NOT_A_RECORD, NEWER_FORMAT, or HEADER_DIGEST for a length that no header has.
    """
    if len(first) < PREFIX.size:
        raise RecordError(Problem.TRUNCATED, f"{len(first)} bytes hold no header")
    magic, written_format, min_reader, length = PREFIX.unpack_from(first)
    if magic != MAGIC:
        raise RecordError(Problem.NOT_A_RECORD, f"begins with {bytes(magic).hex()}")
    if min_reader > FORMAT:
        raise RecordError(
            Problem.NEWER_FORMAT, f"format {written_format} needs a reader of format {min_reader}, this is {FORMAT}"
        )
    if length % BLOCK_BYTES or not BLOCK_BYTES <= length <= MAX_HEADER_BYTES:
        raise RecordError(Problem.HEADER_DIGEST, f"a header of {length} bytes")
    return int(length)


def claimed_set(first: bytes | memoryview) -> bytes:
    """The set fingerprint that the header's first bytes name, before anything is verified; empty if too short."""
    end = PREFIX.size + 32
    return bytes(first[PREFIX.size : end]) if len(first) >= end else b""


def decode_header(data: bytes | memoryview) -> RecordHeader:
    """Decode a header; ``data`` begins with it and may go on behind it.

    Nothing is believed before the SHA-256 at the header's end is right, and no size is taken from the bytes that is
    not then equal to the one computed from the counts.

    Raises:
        RecordError: TRUNCATED, NOT_A_RECORD, NEWER_FORMAT, HEADER_DIGEST or INCONSISTENT.
    """
    length = header_length(data)
    if len(data) < length:
        raise RecordError(Problem.TRUNCATED, f"{len(data)} of {length} header bytes")
    header = memoryview(data)[:length]
    if hashlib.sha256(header[:-SHA256_BYTES]).digest() != header[-SHA256_BYTES:]:
        raise RecordError(Problem.HEADER_DIGEST, "the header's SHA-256 is not that of its bytes")
    (_, written_format, _, _, set_fingerprint, key, store_id, parent_key, start_key, start, end, page_tokens,
     tail_tokens, flags) = INVARIANT.unpack_from(header)  # fmt: skip
    identity = RecordIdentity(
        key=key,
        store_id=store_id,
        parent_key=parent_key if flags & HAS_PARENT else b"",
        start_key=start_key,
        start=start,
        end=end,
        page_tokens=page_tokens,
        tail_tokens=tail_tokens,
        has_row=bool(flags & HAS_ROW),
    )
    problem = identity_problem(identity)
    if problem is not None:
        raise RecordError(Problem.INCONSISTENT, problem)
    num_tokens = end - start
    at = _bound_at(num_tokens)
    if at + BOUND.size > length:
        raise RecordError(Problem.INCONSISTENT, f"{num_tokens} token ids do not fit a header of {length} bytes")
    (layout_fingerprint, rank, world_size, pages_at, page_bytes, tail_at, tail_bytes, row_at, row_bytes, file_bytes,
     num_pages, algorithm) = BOUND.unpack_from(header, at)  # fmt: skip
    layout = file_layout(identity, page_bytes=page_bytes, row_stride=row_bytes)
    written = (length, pages_at, num_pages, tail_at, tail_bytes, row_at, row_bytes, file_bytes, algorithm)
    implied = (layout.header_bytes, layout.header_bytes, layout.num_pages, layout.pages_end,
               layout.tail_end - layout.pages_end, layout.tail_end, layout.row_end - layout.tail_end, layout.row_end,
               DIGEST_XXH3_128)  # fmt: skip
    is_aligned = page_bytes and not page_bytes % BLOCK_BYTES and not row_bytes % BLOCK_BYTES
    if written != implied or not is_aligned or bool(row_bytes) != identity.has_row:
        raise RecordError(Problem.INCONSISTENT, f"sizes {written} where the counts imply {implied}")
    at += BOUND.size
    return RecordHeader(
        set_fingerprint=set_fingerprint,
        identity=identity,
        token_ids=bytes(header[TOKENS_AT : TOKENS_AT + 4 * num_tokens]),
        layout_fingerprint=layout_fingerprint,
        rank=rank,
        world_size=world_size,
        layout=layout,
        digests=bytes(header[at : at + DIGEST_BYTES * layout.num_digests]),
        invariant_digest=rank_invariant_digest(header, num_tokens),
        format=written_format,
    )


def check_header(header: RecordHeader, *, set_fingerprint: bytes, geometry: Geometry) -> None:
    """Is this a file of this set, written by this rank with this geometry?

    Raises:
        RecordError: OTHER_SET, OTHER_RANK or OTHER_LAYOUT, with both values.
    """
    if header.set_fingerprint != set_fingerprint:
        raise RecordError(
            Problem.OTHER_SET, f"set {header.set_fingerprint.hex()[:16]}, this is {set_fingerprint.hex()[:16]}"
        )
    written, own = (header.rank, header.world_size), (geometry.rank, geometry.world_size)
    if written != own:
        raise RecordError(Problem.OTHER_RANK, f"rank {written[0]} of {written[1]}, this is rank {own[0]} of {own[1]}")
    # The decoder has checked every size against the counts; page and row bytes are what it could not know.
    layout = header.layout
    sizes = (layout.page_bytes, layout.row_end - layout.tail_end)
    expected = (geometry.page_bytes, geometry.row_stride if layout.has_row else 0)
    if header.layout_fingerprint != geometry.layout_fingerprint or sizes != expected:
        raise RecordError(
            Problem.OTHER_LAYOUT,
            f"layout {header.layout_fingerprint.hex()[:16]}, this is {geometry.layout_fingerprint.hex()[:16]}",
        )
