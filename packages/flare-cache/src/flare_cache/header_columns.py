"""Judges the headers of very many record files at once. What it accepts, ``record.decode_header`` accepts, too.

For headers of one block, as most are. It says which are beyond doubt; why the others are not is the decoder's to say.
Works on bytes; opens no file.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flare_cache.digest import DIGEST_BYTES
from flare_cache.record import (
    BLOCK_BYTES,
    BOUND,
    BOUND_ALIGNMENT,
    DIGEST_XXH3_128,
    FORMAT,
    HAS_ROW,
    MAGIC,
    MAX_PAGE_TOKENS,
    MAX_TOKENS,
    PREFIX,
    SHA256_BYTES,
    TOKENS_AT,
)
from flare_cache.record_table import IDENTITY, KEEP_ROW, KEEP_TAIL, RecordTable
from flare_core.geometry import Geometry

__all__ = ["FileEnds", "file_ends", "has_possible_counts", "sound_headers"]

_Column = NDArray[np.int64]

_FINGERPRINT_BYTES = 32
_IDENTITY_AT = PREFIX.size + _FINGERPRINT_BYTES
_PREFIX = np.dtype([("magic", "V8"), ("format", "<u2"), ("min_reader", "<u2"), ("length", "<u4"), ("set", "V32")])
_BOUND = np.dtype(
    [
        ("layout", "V32"),
        ("rank", "<u4"),
        ("world_size", "<u4"),
        ("pages_at", "<i8"),
        ("page_bytes", "<i8"),
        ("tail_at", "<i8"),
        ("tail_bytes", "<i8"),
        ("row_at", "<i8"),
        ("row_bytes", "<i8"),
        ("file_bytes", "<i8"),
        ("num_pages", "<u4"),
        ("algorithm", "<u4"),
    ]
)
_BLOCK_TOKENS = (BLOCK_BYTES - TOKENS_AT) // 4


class FileEnds(NamedTuple):
    """The legal sizes of N files; see :class:`flare_cache.record.FileLayout`."""

    header_bytes: _Column
    pages_end: _Column
    tail_end: _Column
    row_end: _Column

    def parts(self, file_sizes: _Column) -> tuple[_Column, NDArray[np.uint8]]:
        """The legal sizes that files of these sizes count as (-1: invalid), and what is there of tail and row."""
        sizes = np.where(
            file_sizes >= self.row_end,
            self.row_end,
            np.where(
                file_sizes >= self.tail_end, self.tail_end, np.where(file_sizes >= self.pages_end, self.pages_end, -1)
            ),
        )
        has_tail = (self.tail_end > self.pages_end) & (sizes >= self.tail_end)
        has_row = (self.row_end > self.tail_end) & (sizes >= self.row_end)
        return sizes, (np.where(has_tail, KEEP_TAIL, 0) | np.where(has_row, KEEP_ROW, 0)).astype(np.uint8)


def sound_headers(
    blocks: NDArray[np.uint8],
    *,
    keys: bytes,
    file_sizes: NDArray[np.int64],
    geometry: Geometry,
    set_fingerprint: bytes,
    with_token_ids: bool,
) -> tuple[NDArray[np.intp], RecordTable]:
    """Those of N files that hold a sound record of this set, rank and layout with a header of one block.

    Args:
        blocks: N x 4096: the first block of each file.
        keys: 32 bytes a file: the keys that the names say.
        file_sizes: N.
        geometry, set_fingerprint: this rank's.
        with_token_ids: keep the token ids, too.

    Returns:
        Their places, and their records in that order. Whoever is left out may be sound all the same: a longer header.
    """
    prefix = _columns(blocks, 0, _PREFIX)
    identities = _columns(blocks, _IDENTITY_AT, IDENTITY)
    good = (
        (prefix["magic"] == np.void(MAGIC))
        & (prefix["min_reader"] <= FORMAT)
        & (prefix["length"] == BLOCK_BYTES)
        & (prefix["set"] == np.void(set_fingerprint))
        & (identities["key"] == np.frombuffer(keys, dtype="V32"))
        & has_possible_counts(identities, max_tokens=_BLOCK_TOKENS)
    )
    candidates = np.flatnonzero(good)
    identities = identities[candidates]
    ends = file_ends(identities, geometry)
    # What the header says of its own length is in the prefix; here it is what the counts imply.
    fits = (ends.header_bytes == BLOCK_BYTES) & (file_sizes[candidates] >= ends.pages_end)
    num_tokens = identities["end"] - identities["start"]
    bound_at = np.where(fits, _bound_at(num_tokens), 0)
    fits &= _fits_bound(_gathered(blocks[candidates], bound_at, _BOUND), geometry, ends)
    fits[fits], digests, token_ids = _digested(
        blocks, candidates[fits], num_tokens[fits].tolist(), with_token_ids=with_token_ids
    )
    sizes, parts = ends.parts(file_sizes[candidates])
    table = RecordTable(
        identities[fits], np.frombuffer(b"".join(digests), dtype="V32"), sizes[fits], parts[fits], token_ids
    )
    return candidates[fits], table


def has_possible_counts(identities: NDArray[np.void], *, max_tokens: int) -> NDArray[np.bool_]:
    """Which of N rows of :data:`IDENTITY` could be a record's; as :func:`flare_cache.record.identity_problem`."""
    start, end = identities["start"], identities["end"]
    page_tokens, tail_tokens = _counts(identities)
    divisor = np.maximum(page_tokens, 1)
    possible: NDArray[np.bool_] = (
        (start >= 0)
        & (start < end)
        & (end <= MAX_TOKENS)
        & (end - start <= max_tokens)
        & (page_tokens >= 1)
        & (page_tokens <= MAX_PAGE_TOKENS)
        & (tail_tokens < page_tokens)
        & (start % divisor == 0)
        & ((end - start - tail_tokens) % divisor == 0)
    )
    return possible


def file_ends(identities: NDArray[np.void], geometry: Geometry) -> FileEnds:
    """Legal sizes on a rank of this geometry of N records with possible counts; as ``record.file_layout``."""
    num_tokens = identities["end"] - identities["start"]
    page_tokens, tail_tokens = _counts(identities)
    num_pages = (num_tokens - tail_tokens) // page_tokens
    has_row = (identities["flags"] & HAS_ROW) != 0
    num_digests = num_pages + (tail_tokens > 0) + has_row
    content = _bound_at(num_tokens) + BOUND.size + DIGEST_BYTES * num_digests + SHA256_BYTES
    header_bytes = -(-content // BLOCK_BYTES) * BLOCK_BYTES
    pages_end = header_bytes + num_pages * geometry.page_bytes
    tail_end = pages_end + np.where(tail_tokens > 0, geometry.page_bytes, 0)
    return FileEnds(header_bytes, pages_end, tail_end, tail_end + np.where(has_row, geometry.row_stride, 0))


def _counts(identities: NDArray[np.void]) -> tuple[_Column, _Column]:
    """Tokens of a page and of the tail, in numbers that do not wrap."""
    return identities["page_tokens"].astype(np.int64), identities["tail_tokens"].astype(np.int64)


def _bound_at(num_tokens: _Column) -> _Column:
    at: _Column = -(-(TOKENS_AT + 4 * num_tokens) // BOUND_ALIGNMENT) * BOUND_ALIGNMENT
    return at


def _columns(blocks: NDArray[np.uint8], at: int, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """The rows of ``dtype`` at offset ``at`` of every block, copied."""
    return np.ascontiguousarray(blocks[:, at : at + dtype.itemsize]).view(dtype)[:, 0]


def _gathered(blocks: NDArray[np.uint8], at: _Column, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """The row of ``dtype`` at an offset of its own in every block."""
    places = at[:, None] + np.arange(dtype.itemsize)
    return np.take_along_axis(blocks, places, axis=1).view(dtype)[:, 0]


def _fits_bound(bound: NDArray[np.void], geometry: Geometry, ends: FileEnds) -> NDArray[np.bool_]:
    """The rank-bound part is this rank's, and every size in it is the one that the counts imply."""
    fits: NDArray[np.bool_] = (
        (bound["layout"] == np.void(geometry.layout_fingerprint))
        & (bound["rank"] == geometry.rank)
        & (bound["world_size"] == geometry.world_size)
        & (bound["pages_at"] == BLOCK_BYTES)
        & (bound["page_bytes"] == geometry.page_bytes)
        & (bound["tail_at"] == ends.pages_end)
        & (bound["tail_bytes"] == ends.tail_end - ends.pages_end)
        & (bound["row_at"] == ends.tail_end)
        & (bound["row_bytes"] == ends.row_end - ends.tail_end)
        & (bound["file_bytes"] == ends.row_end)
        & (bound["num_pages"] == (ends.pages_end - BLOCK_BYTES) // geometry.page_bytes)
        & (bound["algorithm"] == DIGEST_XXH3_128)
    )
    return fits


def _digested(
    blocks: NDArray[np.uint8], places: NDArray[np.intp], num_tokens: list[int], *, with_token_ids: bool
) -> tuple[NDArray[np.bool_], list[bytes], list[bytes]]:
    """Which headers have the SHA-256 that they end with; of those, the rank-invariant digests and the token ids."""
    sha256 = hashlib.sha256
    view = blocks.reshape(-1).data
    is_sound = np.zeros(len(places), dtype=bool)
    digests: list[bytes] = []
    token_ids: list[bytes] = []
    for number, (place, tokens) in enumerate(zip(places.tolist(), num_tokens, strict=True)):
        begin = place * BLOCK_BYTES
        end = begin + BLOCK_BYTES - SHA256_BYTES
        if sha256(view[begin:end]).digest() != view[end : end + SHA256_BYTES]:
            continue
        is_sound[number] = True
        tokens_end = begin + TOKENS_AT + 4 * tokens
        digests.append(sha256(view[begin:tokens_end]).digest())
        token_ids.append(bytes(view[begin + TOKENS_AT : tokens_end]) if with_token_ids else b"")
    return is_sound, digests, token_ids
