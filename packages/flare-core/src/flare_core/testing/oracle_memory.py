"""Page-major numpy memory of one rank of the oracle model: the pages and rows that transfers read and write."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from flare_core.geometry import DTYPE_BYTES, PAGE_ALIGNMENT, Geometry, Plane
from flare_core.testing.oracle_math import Bytes

__all__ = ["OracleMemory"]


class OracleMemory:
    """``num_pages`` pages and ``num_row_slots`` rows, each pool one zeroed run of bytes aligned to 4096.

    Implements ``flare_core.ports.PageMemory``: addresses are valid as long as this object lives.
    """

    def __init__(self, geometry: Geometry, *, num_pages: int, num_row_slots: int) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        self.pages = _aligned(num_pages, geometry.page_bytes)
        self.rows = _aligned(num_row_slots if geometry.row_bytes else 0, geometry.row_stride)
        self._planes = [
            _plane_view(self.pages, geometry.page_bytes, offset, plane)
            for plane, offset in zip(geometry.planes, geometry.plane_offsets, strict=True)
        ]

    @property
    def device(self) -> str:
        """Always "cpu"."""
        return "cpu"

    def page_segments(self, page: int) -> Sequence[tuple[int, int]]:
        """The page's one (address, length)."""
        return ((self.pages[page].ctypes.data, self.geometry.page_bytes),)

    def row_segments(self, slot: int) -> Sequence[tuple[int, int]]:
        """The row's one (address, length)."""
        return ((self.rows[slot].ctypes.data, self.geometry.row_stride),)

    def write_entries(self, page: int, plane: int, first: int, data: Bytes) -> None:
        """Entries [first, first + n) of a plane := ``data``, shape [n, bytes of an entry]."""
        target = self._planes[plane][page, first : first + len(data)]
        target[...] = data.reshape(target.shape)

    def entry_bytes(self, plane: int) -> int:
        """Bytes of one entry of a plane."""
        return int(np.prod(self._planes[plane].shape[2:]))

    def page_digest(self, page: int, num_tokens: int) -> int:
        """64 bits over every byte of the complete entries of the page's first ``num_tokens`` tokens."""
        digest = hashlib.blake2b(digest_size=8)
        for plane, view in zip(self.geometry.planes, self._planes, strict=True):
            digest.update(view[page, : num_tokens // plane.tokens_per_entry].tobytes())
        return int.from_bytes(digest.digest(), "little")

    def is_zero_behind(self, page: int, num_tokens: int) -> bool:
        """Every entry of the page that its first ``num_tokens`` tokens do not complete is zero."""
        return not any(
            view[page, num_tokens // plane.tokens_per_entry :].any()
            for plane, view in zip(self.geometry.planes, self._planes, strict=True)
        )

    def row_digest(self, slot: int) -> int:
        """64 bits over every byte of a row; 0 for models without rows."""
        if not self.geometry.row_bytes:
            return 0
        data = self.rows[slot, : self.geometry.row_bytes].tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Target := the complete entries of the source's first ``num_tokens`` tokens, zeros behind."""
        self.pages[target] = 0
        for plane, view in zip(self.geometry.planes, self._planes, strict=True):
            num_entries = num_tokens // plane.tokens_per_entry
            view[target, :num_entries] = view[source, :num_entries]

    def copy_row(self, source: int, target: int) -> None:
        """Row ``target`` := row ``source``, or zeros for source -1."""
        self.rows[target] = 0 if source < 0 else self.rows[source]


def _aligned(count: int, stride: int) -> Bytes:
    raw = np.zeros(count * stride + PAGE_ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE_ALIGNMENT
    return raw[start : start + count * stride].reshape(count, stride)


def _plane_view(pages: Bytes, page_bytes: int, offset: int, plane: Plane) -> Bytes:
    """View [page, token entry, other axes …, bytes of an element] of one plane of all pages."""
    shape = [axis.size for axis in plane.axes] + [DTYPE_BYTES[plane.dtype]]
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    token_axis = next(index for index, axis in enumerate(plane.axes) if axis.name == "token")
    view = np.ndarray((len(pages), *shape), dtype=np.uint8, buffer=pages, offset=offset, strides=(page_bytes, *strides))
    return np.moveaxis(view, 1 + token_axis, 1)
