"""The room of a pool: namespaces, quotas, what is evicted, and what is deleted when its grace is over. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from flare_cache.pool.core_words import DeleteObjects, PoolLimits, ShardFacts
from flare_cache.pool.manifest import Manifest, manifest_name, shard_name
from flare_cache.pool.messages import Refused, RefusedReason
from flare_cache.pool.pool_index import PoolIndex

__all__ = ["Landed", "Namespace", "PoolSpace"]

Landed = dict[int, ShardFacts]
"""Shards of one store that are in, by rank."""


@dataclass(slots=True)
class Namespace:
    """What is visible, shards in storage that are not yet, by (key, store id), and bytes of those on their way."""

    index: PoolIndex
    landed: dict[tuple[bytes, bytes], Landed] = field(default_factory=dict)
    reserved_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """What counts against the quota: visible, landed, on its way."""
        landed = sum(fact.num_bytes for shards in self.landed.values() for fact in shards.values())
        return self.index.num_bytes + landed + self.reserved_bytes


@dataclass(slots=True)
class PoolSpace:
    """See the module. Deletions are collected in ``deletions`` until they are taken."""

    limits: PoolLimits
    namespaces: dict[bytes, Namespace] = field(default_factory=dict)
    deletions: list[DeleteObjects] = field(default_factory=list)
    num_evicted: int = 0
    num_condemned: int = 0
    _doomed: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    _uncommitted: dict[tuple[bytes, bytes, bytes], float] = field(default_factory=dict)

    def namespace(self, namespace: bytes, page_tokens: int) -> Namespace:
        """The namespace, made if it is new."""
        found = self.namespaces.get(namespace)
        if found is None:
            found = self.namespaces[namespace] = Namespace(PoolIndex(page_tokens))
        return found

    def make_room(self, namespace: bytes, found: Namespace, num_bytes: int, now: float) -> Refused | None:
        """Evict what is needed for ``num_bytes`` more; or why they cannot be had."""
        quota, limit = self.limits.quota_bytes, self.limits.limit_bytes
        if quota is not None and found.held_bytes + num_bytes > quota:
            self._evict(namespace, found.held_bytes + num_bytes - quota, now)
            if found.held_bytes + num_bytes > quota:
                return Refused(reason=RefusedReason.QUOTA, detail=f"{found.held_bytes} of {quota} bytes are used")
        while limit is not None and self._held_bytes() + num_bytes > limit:
            fullest = max(self.namespaces, key=lambda each: self.namespaces[each].index.num_bytes)
            if not self._evict(fullest, self._held_bytes() + num_bytes - limit, now):
                return Refused(reason=RefusedReason.FULL, detail=f"the pool is limited to {limit} bytes")
        return None

    def condemn(self, namespace: bytes, key: bytes, now: float) -> None:
        """A record is bad: it goes, and all that extends it."""
        found = self.namespaces.get(namespace)
        gone = found.index.remove(key) if found is not None else []
        self.num_condemned += len(gone)
        self.withdraw(namespace, gone, now)

    def tick(self, now: float, *, busy: Set[tuple[bytes, bytes]]) -> None:
        """Delete shards whose grace is over, and those that nobody has committed for so long that nobody will.

        ``busy``: (namespace, key) of records that are being put or committed.
        """
        self._give_up(now, busy)
        self.deletions += [DeleteObjects(names) for at, names in self._doomed if now >= at and names]
        self._doomed = [(at, names) for at, names in self._doomed if now < at]

    def spare(self, name: str) -> None:
        """A shard of this name is to be put again: it is not deleted for what it once was."""
        self._doomed = [(at, tuple(one for one in names if one != name)) for at, names in self._doomed]

    def doom(self, namespace: bytes, manifest: Manifest, now: float) -> None:
        """A record was put that another store of the same key came before: its shards go after the grace."""
        self._doomed.append((now + self.limits.grace_seconds, tuple(_shard_names(namespace, [manifest]))))

    def _give_up(self, now: float, busy: Set[tuple[bytes, bytes]]) -> None:
        patience = self.limits.transfer_seconds + self.limits.grace_seconds
        seen = self._uncommitted
        self._uncommitted = {}
        for namespace, found in self.namespaces.items():
            for key, store_id in list(found.landed):
                place = (namespace, key, store_id)
                since = now if (namespace, key) in busy else seen.get(place, now)
                if now - since < patience:
                    self._uncommitted[place] = since
                    continue
                ranks = found.landed.pop((key, store_id))
                self.deletions.append(DeleteObjects(tuple(shard_name(*place, rank) for rank in sorted(ranks))))

    def _held_bytes(self) -> int:
        return sum(found.held_bytes for found in self.namespaces.values())

    def _evict(self, namespace: bytes, num_bytes: int, now: float) -> bool:
        gone = self.namespaces[namespace].index.make_room(num_bytes)
        self.num_evicted += len(gone)
        self.withdraw(namespace, gone, now)
        return bool(gone)

    def withdraw(self, namespace: bytes, manifests: Sequence[Manifest], now: float) -> None:
        """Delete what is visible no more: manifests first, shards when no transfer can be reading them."""
        if not manifests:
            return
        self.deletions.append(DeleteObjects(tuple(manifest_name(namespace, one.record.key) for one in manifests)))
        self._doomed.append((now + self.limits.grace_seconds, tuple(_shard_names(namespace, manifests))))


def _shard_names(namespace: bytes, manifests: Sequence[Manifest]) -> Iterator[str]:
    for one in manifests:
        for rank in range(len(one.shards)):
            yield shard_name(namespace, one.record.key, one.record.store_id, rank)
