"""Pages and rows in host memory, as the byte views that files are read into and written from.

Knows addresses and alignment; knows no files, jobs or devices. A passage is how bytes get between the memory of
pages and host memory that the system calls can use: on CPU they are the same memory, on CUDA staging lies between
(:mod:`flare_cache.cuda_staging`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flare_core.geometry import PAGE_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "DeviceFault",
    "DirectPassage",
    "Passage",
    "Segments",
    "Window",
    "aligned_buffer",
    "copy_views",
    "new_mapping",
    "view_at",
]

Segments = Sequence[tuple[int, int]]
"""Where one page or row lies: (address, length) pieces in order."""

_HUGE_PAGE_BYTES = 2 << 20


def view_at(address: int, length: int) -> memoryview:
    """The bytes at a host address. The caller keeps the memory alive as long as the view."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def new_mapping(num_bytes: int) -> mmap.mmap:
    """New zeroed memory, aligned to 4096 bytes, of its own. Raises OSError where there is none."""
    # Private: shared memory is not backed by huge pages as advised below, and MADV_DONTNEED gives none of it back.
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTDUMP"):
        # It will hold users' prompts, which a core dump must not.
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def aligned_buffer(num_bytes: int) -> memoryview:
    """New zeroed memory, aligned to 4096 bytes, freed when the last view is gone."""
    return memoryview(new_mapping(num_bytes))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy_views(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy the bytes of ``sources``, one behind the other, into ``targets`` of the same total length.

    The GIL is released during each copy. All views are writable (their addresses are taken).
    """
    pending = [(_address(view), len(view)) for view in sources if len(view)]
    pending.reverse()
    for view in targets:
        at, room = _address(view) if len(view) else 0, len(view)
        while room:
            source, available = pending.pop()
            step = min(room, available)
            ctypes.memmove(at, source, step)
            at, room = at + step, room - step
            if step < available:
                pending.append((source + step, available - step))


class DeviceFault(Exception):
    """A device call failed: copies that were under way must be taken as under way for ever. The process must end."""


@dataclass(frozen=True, slots=True)
class Window:
    """Host views of some sections, for the time of one part of a transfer.

    Attributes:
        sections: for each section, its bytes in pieces, in order.
        deliver: after the views were filled and verified: block until the pages hold the bytes.
    """

    sections: Sequence[Sequence[memoryview]]
    deliver: Callable[[], None]


class Passage(Protocol):
    """Way between page memory and host memory. Thread-safe; both calls may block for a staging buffer or a copy.

    What a window lends is valid inside its ``with`` only. Both may raise DeviceFault.
    """

    @property
    def part_bytes(self) -> int | None:
        """Largest sum of bytes that one window can hold; None: any."""
        ...

    def incoming(self, sections: Sequence[Segments]) -> AbstractContextManager[Window]:
        """A window to fill: ``deliver`` brings its bytes to ``sections``."""
        ...

    def outgoing(self, sections: Sequence[Segments]) -> AbstractContextManager[Window]:
        """A window that holds the bytes of ``sections``."""
        ...


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class DirectPassage:
    """Pages in host memory: the disk reads straight into them.

    Attributes:
        aligned: system calls need memory aligned to 4096 bytes (O_DIRECT): pages whose segments are not, another
            engine's for example, pass through a buffer.
    """

    aligned: bool
    part_bytes: int | None = None

    def _bounces(self, sections: Sequence[Segments]) -> bool:
        return self.aligned and any(
            address % PAGE_ALIGNMENT or length % PAGE_ALIGNMENT for segments in sections for address, length in segments
        )

    @contextmanager
    def incoming(self, sections: Sequence[Segments]) -> Iterator[Window]:
        """Views of the pages themselves, or of a buffer that ``deliver`` copies from."""
        views = _views(sections)
        if not self._bounces(sections):
            yield Window(views, _nothing)
            return
        buffers = _buffers(sections)

        def deliver() -> None:
            for target, source in zip(views, buffers, strict=True):
                copy_views(target, source)

        yield Window(buffers, deliver)

    @contextmanager
    def outgoing(self, sections: Sequence[Segments]) -> Iterator[Window]:
        """Views of the pages themselves, or of a buffer with a copy."""
        views = _views(sections)
        if not self._bounces(sections):
            yield Window(views, _nothing)
            return
        buffers = _buffers(sections)
        for target, source in zip(buffers, views, strict=True):
            copy_views(target, source)
        yield Window(buffers, _nothing)


def _views(sections: Sequence[Segments]) -> list[list[memoryview]]:
    return [[view_at(address, length) for address, length in segments] for segments in sections]


def _buffers(sections: Sequence[Segments]) -> list[list[memoryview]]:
    return [[aligned_buffer(sum(length for _, length in segments))] for segments in sections]
