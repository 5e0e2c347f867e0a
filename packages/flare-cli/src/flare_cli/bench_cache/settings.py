"""What one benchmark group is made of, in a form that travels to the peer processes; and what follows from it.

Knows sizes and identities; starts nothing.
"""

from __future__ import annotations

import hashlib

import msgspec

from flare_cache.settings import CacheSettings
from flare_core.errors import UsageError
from flare_core.geometry import PAGE_ALIGNMENT, Axis, Geometry, Plane, SetIdentity, align_up

__all__ = ["PAGE_TOKENS", "GroupSettings", "cache_settings", "check_settings", "set_identity"]

PAGE_TOKENS = 64
# Token ids, a digest, and the fields of a header that holds one page alone.
_HEADER_BYTES_PER_PAGE = 4 * PAGE_TOKENS + 1024


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One group of ranks on this host.

    Attributes:
        world_size: ranks, each a process.
        directory: where the ranks' record directories are made.
        bytes_per_rank: pages of each rank, a multiple of ``page_bytes``.
        page_bytes: one page on every rank, a multiple of 4096.
        record_bytes: largest file of a record.
        num_threads: disk threads of each rank, and threads of its raw read.
        num_outstanding: jobs that ranks work on at a time.
        memory_bytes: size of each rank's memory tier; 0: none.
        seed: of the pages' content.
    """

    world_size: int
    directory: str
    bytes_per_rank: int
    page_bytes: int
    record_bytes: int
    num_threads: int
    num_outstanding: int
    memory_bytes: int = 0
    seed: int = 0

    @property
    def num_pages(self) -> int:
        """Pages of each rank."""
        return self.bytes_per_rank // self.page_bytes

    @property
    def disk_bytes(self) -> int:
        """Disk limit of each rank: its pages, and room for a header beside every one of them."""
        header_bytes = align_up(_HEADER_BYTES_PER_PAGE, PAGE_ALIGNMENT)
        return self.num_pages * (self.page_bytes + header_bytes)


def check_settings(settings: GroupSettings) -> None:
    """Can a group be made of this?

    Raises:
        UsageError: names the option, its value and what it must be.
    """
    page_bytes = settings.page_bytes
    if page_bytes < PAGE_ALIGNMENT or page_bytes % PAGE_ALIGNMENT:
        raise UsageError(f"--page-bytes {page_bytes} is not a multiple of {PAGE_ALIGNMENT}")
    if settings.num_pages < 1:
        raise UsageError(f"--bytes {settings.bytes_per_rank} is less than one page of {page_bytes} bytes")


def set_identity(settings: GroupSettings) -> SetIdentity:
    """The benchmark's record set."""
    return SetIdentity(
        model=hashlib.sha256(b"flare bench cache").digest(),
        page_tokens=PAGE_TOKENS,
        kv_dtype="uint8",
        compute_dtype="uint8",
        device_kind="cpu",
        numerics=0,
        geometries=_geometries(settings),
    )


def cache_settings(settings: GroupSettings) -> CacheSettings:
    """The record path's settings, equal on every rank."""
    return CacheSettings(
        identity=set_identity(settings),
        salt_key_id=bytes(16),
        has_disk=True,
        disk_limit_bytes=settings.disk_bytes,
        memory_bytes=settings.memory_bytes or None,
        max_record_bytes=settings.record_bytes,
    )


def _geometries(settings: GroupSettings) -> tuple[Geometry, ...]:
    """Every rank's geometry: pages of :data:`PAGE_TOKENS` tokens that take ``page_bytes``, no rows."""
    axes = (Axis("token", PAGE_TOKENS), Axis("byte", settings.page_bytes // PAGE_TOKENS))
    planes = (Plane("bytes", "uint8", axes),)
    return tuple(Geometry(rank, settings.world_size, PAGE_TOKENS, planes) for rank in range(settings.world_size))
