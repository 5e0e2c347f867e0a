"""A rank's pages in one allocation: the page-major pool, its views for attention, and page copies.

Owns the memory; implements :class:`flare_core.ports.PageMemory`. Knows nothing of who holds which page.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

from flare_core.compute.model_config import ModelConfig
from flare_core.errors import UsageError
from flare_core.geometry import DTYPE_BYTES, Axis, Geometry, Plane
from flare_core.sharding import split_heads

__all__ = ["KvMemory", "geometry_for", "pages_for_bytes"]

_CUDA_ALIGNMENT = 2 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def geometry_for(
    config: ModelConfig, rank: int, world_size: int, *, page_tokens: int = 64, kv_dtype: str = "float32"
) -> Geometry:
    """What a page of ``config`` is on ``rank``: one plane ``[layer, k|v, token, head, dim]`` of the rank's KV heads.

    Raises:
        UsageError: the heads cannot be divided over ``world_size`` ranks.
    """
    heads = split_heads(config.num_heads, config.num_kv_heads, world_size)[rank].kv
    axes = (
        Axis("layer", config.num_layers),
        Axis("kv", 2),
        Axis("token", page_tokens),
        Axis("head", len(heads)),
        Axis("dim", config.head_dim),
    )
    return Geometry(rank, world_size, page_tokens, (Plane("kv", kv_dtype, axes),))


def pages_for_bytes(geometries: Sequence[Geometry], kv_bytes: int) -> int:
    """Pages that fit ``kv_bytes`` on the rank with the largest pages.

    Raises:
        UsageError: not even two pages fit.
    """
    largest = max(geometry.page_bytes for geometry in geometries)
    num_pages = kv_bytes // largest
    if num_pages < 2:
        raise UsageError(f"KV memory of {kv_bytes} bytes holds {num_pages} pages of {largest} bytes; give more")
    return num_pages


class KvMemory:
    """The pool of one rank. Pages are zero until they are written; on the CPU untouched pages take no memory.

    Attributes:
        geometry: what a page is.
        num_pages: page ids are 0 to ``num_pages - 1``.
        views: every page as ``[page, layer, k|v, token, head, dim]``, strided over the pool.
    """

    def __init__(self, geometry: Geometry, num_pages: int, pool: torch.Tensor, owner: object) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        self._pool = pool
        self._owner = owner  # keeps the mapping alive
        plane = geometry.planes[0]
        sizes = tuple(axis.size for axis in plane.axes)
        stride = geometry.page_bytes // DTYPE_BYTES[plane.dtype]
        strides = [1]
        for size in reversed(sizes[1:]):
            strides.append(strides[-1] * size)
        typed = pool.view(-1).view(_DTYPES[plane.dtype])
        self.views = typed.as_strided((num_pages, *sizes), (stride, *reversed(strides)))

    @classmethod
    def allocate(cls, geometry: Geometry, num_pages: int, device: torch.device) -> KvMemory:
        """Room for ``num_pages`` pages on ``device``, zeroed, aligned to 4096 bytes (2 MiB on CUDA)."""
        size = num_pages * geometry.page_bytes
        if device.type == "cpu":
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            if hasattr(mmap, "MADV_DONTDUMP"):
                mapping.madvise(mmap.MADV_DONTDUMP)  # users' prompts are no part of a core dump
            mapped = torch.frombuffer(mapping, dtype=torch.uint8)
            return cls(geometry, num_pages, mapped.view(num_pages, geometry.page_bytes), mapping)
        whole = torch.zeros(size + _CUDA_ALIGNMENT, dtype=torch.uint8, device=device)
        skip = -whole.data_ptr() % _CUDA_ALIGNMENT
        pool = whole[skip : skip + size].view(num_pages, geometry.page_bytes)
        return cls(geometry, num_pages, pool, whole)

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        return str(self._pool.device)

    def page_segments(self, page: int) -> Sequence[tuple[int, int]]:
        """One segment: the page's address and length."""
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} of {self.num_pages}")
        size = self.geometry.page_bytes
        return ((self._pool.data_ptr() + page * size, size),)

    def row_segments(self, slot: int) -> Sequence[tuple[int, int]]:  # noqa: ARG002  attention has no rows
        """None: attention keeps no per-sequence state row."""
        return ()

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """``target`` becomes the first ``num_tokens`` tokens of ``source``, zeros behind."""
        if num_tokens == self.geometry.page_tokens:
            self._pool[target].copy_(self._pool[source])
            return
        self._pool[target].zero_()
        self.views[target, :, :, :num_tokens].copy_(self.views[source, :, :, :num_tokens])

    def page_bytes(self, page: int) -> bytes:
        """A copy of the page's bytes, for tests and inspection; blocks on a device."""
        host = self._pool[page].cpu()
        return ctypes.string_at(host.data_ptr(), self.geometry.page_bytes)
