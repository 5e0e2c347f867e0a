"""One rank's pages and rows, and the way to them: views as on a CPU, or staging buffers as on CUDA.

Knows addresses inside its own memory. What is in the pages is the device's and the transfers' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from flare_cache.host_memory import DeviceFault, Segments, Window
from flare_core.geometry import Geometry

__all__ = ["SimMemory", "SimPassage"]

_ROWS_AT = 1 << 40


class SimMemory:
    """``num_pages`` pages and ``num_slots`` rows; a ``flare_core.ports.PageMemory`` with addresses of its own."""

    def __init__(self, geometry: Geometry, *, num_pages: int, num_slots: int) -> None:
        self.geometry = geometry
        self.page_bytes = geometry.page_bytes
        self.row_stride = geometry.row_stride
        self.pages = memoryview(bytearray(num_pages * self.page_bytes))
        self.rows = memoryview(bytearray(num_slots * self.row_stride))

    @property
    def device(self) -> str:
        """Host memory, as far as anyone can tell."""
        return "cpu"

    def page_segments(self, page: int) -> Sequence[tuple[int, int]]:
        """One segment."""
        return ((page * self.page_bytes, self.page_bytes),)

    def row_segments(self, slot: int) -> Sequence[tuple[int, int]]:
        """One segment."""
        return ((_ROWS_AT + slot * self.row_stride, self.row_stride),)

    def view(self, address: int, length: int) -> memoryview:
        """The bytes of a segment."""
        if address >= _ROWS_AT:
            return self.rows[address - _ROWS_AT : address - _ROWS_AT + length]
        return self.pages[address : address + length]

    def place_of(self, address: int) -> int:
        """The page's id, or -1 - slot for a row."""
        if address >= _ROWS_AT:
            return -1 - (address - _ROWS_AT) // self.row_stride
        return address // self.page_bytes


@dataclass(frozen=True, slots=True)
class SimPassage:
    """A ``flare_cache.host_memory.Passage``.

    Attributes:
        is_staged: bytes pass through buffers, and reach the pages only when they are delivered.
        on_deliver: told (place, bytes) of what a delivery puts into a page, before it does.
        is_faulty: asked at each window; when it says so the device fails.
    """

    memory: SimMemory
    is_staged: bool
    on_deliver: Callable[[int, memoryview], None]
    is_faulty: Callable[[], bool]
    part_bytes: int | None = None

    def incoming(self, sections: Sequence[Segments]) -> _Lent:
        """A window to fill."""
        if self.is_faulty():
            raise DeviceFault("the simulated device failed")
        views = self._views(sections)
        if not self.is_staged:
            return _Lent(Window(views, _nothing))
        buffers = [[memoryview(bytearray(len(view))) for view in section] for section in views]

        def deliver() -> None:
            for segments, targets, sources in zip(sections, views, buffers, strict=True):
                for (address, _), target, source in zip(segments, targets, sources, strict=True):
                    self.on_deliver(self.memory.place_of(address), source)
                    target[:] = source

        return _Lent(Window(buffers, deliver))

    def outgoing(self, sections: Sequence[Segments]) -> _Lent:
        """A window that holds the bytes of ``sections``."""
        if self.is_faulty():
            raise DeviceFault("the simulated device failed")
        views = self._views(sections)
        if self.is_staged:
            views = [[memoryview(bytearray(view)) for view in section] for section in views]
        return _Lent(Window(views, _nothing))

    def _views(self, sections: Sequence[Segments]) -> list[list[memoryview]]:
        view = self.memory.view
        return [[view(address, length) for address, length in segments] for segments in sections]


@dataclass(frozen=True, slots=True)
class _Lent:
    window: Window

    def __enter__(self) -> Window:
        return self.window

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _nothing() -> None:
    return None
