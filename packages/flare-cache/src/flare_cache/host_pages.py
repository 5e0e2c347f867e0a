"""Pages and row slots in plain host memory: the page memory of CPU ranks, benchmarks and tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from flare_cache.host_memory import aligned_buffer, view_at
from flare_core.geometry import Geometry

__all__ = ["HostPages"]


@dataclass(frozen=True, slots=True)
class HostPages:
    """A page pool in one mapping, aligned to 4096 bytes, pages first; a :class:`flare_core.ports.PageMemory`.

    Attributes:
        geometry: sizes of a page and a row.
        num_pages, num_slots: how many there are.
        base: address of the mapping.
        buffer: the mapping; keeps it alive.
    """

    geometry: Geometry
    num_pages: int
    num_slots: int
    base: int
    buffer: memoryview

    @classmethod
    def allocate(cls, geometry: Geometry, *, num_pages: int, num_slots: int = 0) -> HostPages:
        """New zeroed pages and slots. Raises OSError where there is no memory."""
        num_bytes = num_pages * geometry.page_bytes + num_slots * geometry.row_stride
        buffer = aligned_buffer(num_bytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        return cls(geometry, num_pages, num_slots, base, buffer)

    @property
    def device(self) -> str:
        """Host memory."""
        return "cpu"

    def page_segments(self, page: int) -> Sequence[tuple[int, int]]:
        """One segment."""
        size = self.geometry.page_bytes
        return ((self.base + page * size, size),)

    def row_segments(self, slot: int) -> Sequence[tuple[int, int]]:
        """One segment."""
        size = self.geometry.row_stride
        return ((self.base + self.num_pages * self.geometry.page_bytes + slot * size, size),)

    def page(self, page: int) -> memoryview:
        """The bytes of a page."""
        return view_at(*self.page_segments(page)[0])

    def row(self, slot: int) -> memoryview:
        """The bytes of a row slot."""
        return view_at(*self.row_segments(slot)[0])
