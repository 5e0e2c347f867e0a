"""The rules of the pool: what is visible is whole, no rank is on before all have agreed, nobody says more than is.

What is restored from it is checked as from any tier (see :mod:`checks`).
"""

from __future__ import annotations

from flare_cache.pool.manifest import Manifest, shard_name
from flare_cache.pool.shard_source import extent_bytes
from flare_cache.record import RecordError, check_header, decode_header
from flare_core.prefix import Tier
from flare_qualify.sim.group import Group
from flare_qualify.sim.loop import Violation
from flare_qualify.sim.pool_manager import NAMESPACE, SimManager
from flare_qualify.sim.records import section_problem

__all__ = ["PoolRules"]


class PoolRules:
    """See the module."""

    def __init__(self, pool: SimManager, world_size: int) -> None:
        self._pool = pool
        self._ranks = range(world_size)
        self._on: dict[int, bytes] = {}

    def begin(self) -> None:
        """New processes: none of them is in a session."""
        self._on.clear()

    def switched(self, rank: int, session: bytes | None) -> None:
        """A rank takes jobs of ``session`` from now on, or of none: then every rank is registered, with one manager."""
        if session is None:
            self._on.pop(rank, None)
            return
        registered = self._pool.registered.get(session, {})
        missing = [other for other in self._ranks if other not in registered]
        if missing:
            raise Violation("pool mixed", f"rank {rank} is on, and ranks {missing} have not registered")
        if len(set(registered.values())) > 1:
            raise Violation("pool mixed", f"rank {rank} is on, and ranks registered with different managers")
        self._on[rank] = session
        self._pool.counts["pool on"] += rank == 0

    def check(self, group: Group) -> None:
        """What is visible is whole, and rank zero believes no record there that never was."""
        storage = self._pool.storage
        for manifest in storage.manifests():
            record = manifest.record
            if len(manifest.shards) != len(self._ranks):
                raise Violation("visible only whole", f"{record.key.hex()[:16]} has {len(manifest.shards)} shards")
            for rank in self._ranks:
                name = shard_name(NAMESPACE, record.key, record.store_id, rank)
                problem = None if name in storage.damaged else self._problem(manifest, rank, storage.objects.get(name))
                if problem is not None:
                    raise Violation("visible only whole", f"{record.key.hex()[:16]} on rank {rank}: {problem}")
        store = group.leader.store
        local = store._records[Tier.DISK].index.records() if store is not None else iter(())
        for one in local:
            if one.in_pool and one.key not in storage.committed:
                raise Violation("said to be in the pool", f"{one.key.hex()[:16]} never was")

    def _problem(self, manifest: Manifest, rank: int, data: bytes | None) -> str | None:
        """What is wrong with a shard, found by code of the checkers' own; None: nothing."""
        if data is None:
            return "missing"
        identity = self._pool.identity
        try:
            header = decode_header(memoryview(data))
            check_header(header, set_fingerprint=identity.fingerprint(), geometry=identity.geometries[rank])
        except RecordError as error:
            return str(error)
        if header.identity != manifest.record or len(data) != extent_bytes(header.layout, manifest.extent):
            return f"{len(data)} bytes of {header.identity}"
        return section_problem(header, memoryview(data), rank)

    def check_at_rest(self, group: Group) -> None:
        """Every rank is in the session of rank zero, and nothing is pending."""
        session = group.leader.pool_session
        if session is None or any(self._on.get(rank) != session for rank in self._ranks):
            where = {rank: self._on.get(rank, b"").hex()[:8] for rank in self._ranks}
            raise Violation("pool mixed", f"at rest ranks are in {where}, rank 0 in {(session or b'').hex()[:8]}")
        stored = {manifest.record.key for manifest in self._pool.storage.manifests()}
        if unstored := sorted(self._pool.visible_keys() - stored):
            raise Violation("visible, not stored", f"at rest the manager shows {unstored[0].hex()[:16]}")
