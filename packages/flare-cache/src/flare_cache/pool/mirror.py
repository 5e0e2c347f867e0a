"""What rank zero knows of the pool's records: those that lookups have found lately. Bounded; a hint, never a promise.

The records stand in an index like a tier's, without parents: the pool's manager keeps the tree. One that is gone there
is a miss when it is fetched. Used by the engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from flare_cache.index import Record, RecordIndex
from flare_cache.pool.manifest import Extent, Manifest
from flare_cache.record import identity_problem
from flare_core.prefix import PrefixQuery

__all__ = ["PoolMirror"]

_TOKEN_BYTES = 4


class PoolMirror:
    """See the module.

    Args:
        page_tokens, world_size: of this group; a manifest of another shape is not taken in.
        max_records: known at a time; those used longest ago are forgotten first.
    """

    def __init__(self, *, page_tokens: int, world_size: int, max_records: int = 16_384) -> None:
        self.index = RecordIndex(page_tokens)
        self._page_tokens = page_tokens
        self._world_size = world_size
        self._max_records = max_records

    def take(self, query: PrefixQuery, manifests: Iterable[Manifest]) -> int:
        """Take in what a lookup of ``query`` has found; how many records could not be."""
        num_bad = 0
        for manifest in manifests:
            token_ids = self._token_ids(query, manifest)
            if token_ids is None:
                num_bad += 1
                continue
            known = self.index.get(manifest.record.key)
            if known is not None:
                if known.identity == manifest.record and known.is_usable:
                    self.index.use(known)
                    continue
                self.forget(known)
            self._add(manifest, token_ids)
        while len(self.index) > self._max_records:
            self.forget(next(self.index.records()))
        return num_bad

    def forget(self, record: Record) -> None:
        """It is not in the pool any more, or not wanted here; transfers that use it go on."""
        if self.index.get(record.key) is not record:
            return
        if record.is_usable:
            self.index.hide(record)
        self.index.remove(record)

    def clear(self) -> None:
        """Forget everything."""
        self.index = RecordIndex(self._page_tokens)

    def _add(self, manifest: Manifest, token_ids: bytes) -> None:
        identity = manifest.record
        has_tail = manifest.extent is not Extent.PAGES
        record = Record(
            identity,
            token_ids,
            max(shard.num_bytes for shard in manifest.shards),
            tail_tokens=identity.tail_tokens if has_tail else 0,
            has_row=identity.has_row and manifest.extent is Extent.ROW,
        )
        self.index.add(record)
        self.index.mark_stored(record)

    def _token_ids(self, query: PrefixQuery, manifest: Manifest) -> bytes | None:
        """The record's token ids, which a manifest leaves out where they are the query's; None: it cannot be used."""
        record = manifest.record
        if identity_problem(record) is not None or record.page_tokens != self._page_tokens:
            return None
        if len(manifest.shards) != self._world_size:
            return None
        token_ids = manifest.token_ids or query.token_ids[record.start : record.end].tobytes()
        return token_ids if len(token_ids) == _TOKEN_BYTES * (record.end - record.start) else None
