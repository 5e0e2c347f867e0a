"""What one namespace of the pool holds: records by key, the pages of their chains, and the order of their use. Pure.

A record counts only while all that it extends is there too; one that comes before its parent waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flare_cache.eviction import Evict, choose_relief
from flare_cache.index import Record, RecordIndex
from flare_cache.jobs import Extent
from flare_cache.pool.manifest import Manifest

__all__ = ["PoolIndex"]

_MAX_FOLLOWERS = 8


@dataclass(slots=True)
class PoolIndex:
    """Manifests of one namespace. ``num_bytes`` of all shards that are visible."""

    page_tokens: int
    manifests: dict[bytes, Manifest] = field(default_factory=dict)
    num_bytes: int = 0
    _index: RecordIndex = field(init=False)
    _followers: dict[bytes, dict[bytes, None]] = field(default_factory=dict)
    _waiting: dict[bytes, dict[bytes, Manifest]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = RecordIndex(self.page_tokens)

    def add(self, manifest: Manifest) -> None:
        """Take a manifest in, and what has waited for it. One that is known already changes nothing."""
        pending = [manifest]
        while pending:
            one = pending.pop()
            record = one.record
            if record.key in self.manifests:
                continue
            if record.parent_key and record.parent_key not in self.manifests:
                self._waiting.setdefault(record.parent_key, {})[record.key] = one
                continue
            self._insert(one)
            pending.extend(self._waiting.pop(record.key, {}).values())

    def _insert(self, manifest: Manifest) -> None:
        identity = manifest.record
        record = Record(
            identity,
            manifest.token_ids,
            manifest.num_bytes,
            identity.tail_tokens if manifest.extent is not Extent.PAGES else 0,
            identity.has_row and manifest.extent is Extent.ROW,
            self._index.get(identity.parent_key) if identity.parent_key else None,
        )
        self._index.add(record)
        self._index.mark_stored(record)
        self.manifests[identity.key] = manifest
        self.num_bytes += manifest.num_bytes
        for boundary in _boundaries(record):
            self._followers.setdefault(boundary, {})[identity.key] = None

    def has(self, key: bytes) -> bool:
        """Whether the record is visible."""
        return key in self.manifests

    def get(self, key: bytes) -> Manifest | None:
        """The record's manifest, if it is visible."""
        return self.manifests.get(key)

    def use(self, key: bytes) -> None:
        """The record and all that it extends were used now."""
        record = self._index.get(key)
        if record is not None:
            self._index.use(record)

    def find(self, root: bytes, keys: Sequence[bytes], first_page: int) -> tuple[list[Manifest], int]:
        """Manifests along a chain from ``first_page`` on, in its order, then some that go on where it ends.

        Returns them and how many leading pages of the chain are there.
        """
        num_pages = self._index.num_present(keys)
        found: dict[bytes, None] = {}
        for key in keys[first_page:num_pages]:
            holder = self._index.holder(key)
            if holder is not None:
                found[holder.key] = None
        boundary = keys[num_pages - 1] if num_pages else root
        followers = list(self._followers.get(boundary, {}))[-_MAX_FOLLOWERS:]
        inner = self._index.holder(boundary)
        found.update(dict.fromkeys([*followers, *([inner.key] if inner is not None else [])]))
        if found:
            self.use(next(reversed(found)))
        return [self.manifests[key] for key in found], num_pages

    def remove(self, key: bytes) -> list[Manifest]:
        """Forget a record and all that extends it; their manifests, leaves first."""
        record = self._index.get(key)
        if record is None:
            for waiting in self._waiting.values():
                waiting.pop(key, None)
            return []
        return [self._forget(one) for one in reversed(record.subtree())]

    def make_room(self, num_bytes: int) -> list[Manifest]:
        """Forget what was used longest ago, leaves first, until so much is free; less where there is less."""
        chosen = choose_relief(self._index, num_bytes, row_bytes=lambda _: 0)
        return [self._forget(relief.record) for relief in chosen if isinstance(relief, Evict)]

    def by_use(self) -> Iterator[Manifest]:
        """Every manifest, oldest use first."""
        for record in self._index.records():
            yield self.manifests[record.key]

    def _forget(self, record: Record) -> Manifest:
        self._index.hide(record)
        for boundary in _boundaries(record):
            followers = self._followers[boundary]
            del followers[record.key]
            if not followers:
                del self._followers[boundary]
        self._index.remove(record)
        manifest = self.manifests.pop(record.key)
        self.num_bytes -= manifest.num_bytes
        return manifest


def _boundaries(record: Record) -> set[bytes]:
    """The chain keys behind which the record offers something."""
    boundaries = {record.identity.start_key} if record.num_pages else set()
    if record.tail_tokens:
        boundaries.add(record.tail_boundary())
    return boundaries
