"""What a page and a row are made of on each rank, and the fingerprints that name them.

A page is one contiguous run of bytes: planes one behind the other, each starting at a multiple of
:data:`PLANE_ALIGNMENT`, padded with zeros to :data:`PAGE_ALIGNMENT`. The same bytes lie in device memory, in
staging, on disk and on the wire. Rank zero computes every rank's geometry from the model and the world size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import msgspec

__all__ = [
    "DTYPE_BYTES",
    "PAGE_ALIGNMENT",
    "PLANE_ALIGNMENT",
    "Axis",
    "Geometry",
    "Plane",
    "SetIdentity",
    "align_up",
]

PAGE_ALIGNMENT = 4096
PLANE_ALIGNMENT = 256
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


def align_up(size: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is at least ``size``."""
    return -(-size // alignment) * alignment


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """One axis of a plane, outermost first in the plane's list. The axis named ``token`` counts entries."""

    name: str
    size: int


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """One array inside a page.

    Attributes:
        name: what it holds, for messages ("kv").
        dtype: a key of :data:`DTYPE_BYTES`.
        axes: outermost first; exactly one is named "token".
        tokens_per_entry: tokens that one entry of the token axis stands for (1 for plain attention).
    """

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    tokens_per_entry: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the plane without padding."""
        size = DTYPE_BYTES[self.dtype]
        for axis in self.axes:
            size *= axis.size
        return size


class Geometry(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """One rank's pages and rows.

    Attributes:
        rank, world_size: whose geometry it is.
        page_tokens: tokens of a whole page.
        planes: the page's arrays in their order.
        row_bytes: bytes of the per-sequence state row, 0 for models that need none.
    """

    rank: int
    world_size: int
    page_tokens: int
    planes: tuple[Plane, ...]
    row_bytes: int = 0

    @cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        """Byte offset of each plane inside a page."""
        offsets: list[int] = []
        at = 0
        for plane in self.planes:
            offsets.append(at)
            at = align_up(at + plane.num_bytes, PLANE_ALIGNMENT)
        return tuple(offsets)

    @cached_property
    def page_bytes(self) -> int:
        """Stride of a page: its planes, padded to :data:`PAGE_ALIGNMENT`."""
        last = self.plane_offsets[-1] + self.planes[-1].num_bytes
        return align_up(last, PAGE_ALIGNMENT)

    @cached_property
    def row_stride(self) -> int:
        """Bytes a row takes in a slot and in a file: ``row_bytes`` padded to :data:`PAGE_ALIGNMENT`."""
        return align_up(self.row_bytes, PAGE_ALIGNMENT)

    @cached_property
    def layout_fingerprint(self) -> bytes:
        """SHA-256 over the canonical encoding of this geometry (32 bytes); bound to rank and world size."""
        return hashlib.sha256(b"flare/layout/1" + msgspec.msgpack.encode(self)).digest()


@dataclass(frozen=True, slots=True)
class SetIdentity:
    """Everything that records of one set have in common; its fingerprint is the root of all keys.

    Attributes:
        model: SHA-256 over the model's config and weight files.
        page_tokens: tokens of a whole page.
        kv_dtype, compute_dtype: names as in :data:`DTYPE_BYTES`.
        device_kind: "cpu" or "cuda"; bits differ between kinds.
        numerics: version of the engine's arithmetic; raised whenever the same input gives other bits.
        geometries: every rank's geometry, by rank.
    """

    model: bytes
    page_tokens: int
    kv_dtype: str
    compute_dtype: str
    device_kind: str
    numerics: int
    geometries: tuple[Geometry, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.geometries)

    def fields(self) -> dict[str, str]:
        """Readable field values, in the order they are hashed; what a mismatch is reported by."""
        fields = {
            "model": self.model.hex(),
            "page_tokens": str(self.page_tokens),
            "kv_dtype": self.kv_dtype,
            "compute_dtype": self.compute_dtype,
            "device_kind": self.device_kind,
            "numerics": str(self.numerics),
            "world_size": str(self.world_size),
        }
        for geometry in self.geometries:
            fields[f"layout[{geometry.rank}]"] = geometry.layout_fingerprint.hex()
        return fields

    def fingerprint(self) -> bytes:
        """The set fingerprint, 32 bytes."""
        return hashlib.sha256(b"flare/set/1" + msgspec.msgpack.encode(self.fields())).digest()
