"""The rules of the pool: what is visible is whole, no rank is on before all have agreed, nobody says more than is.

What is restored from it is checked as from any tier (see :mod:`checks`).
"""

from __future__ import annotations

from flare_cache.pool.manifest import manifest_name
from flare_core.prefix import Tier
from flare_qualify.sim.group import Group
from flare_qualify.sim.loop import Violation
from flare_qualify.sim.pool_manager import SimManager

__all__ = ["PoolRules"]

_NAMESPACE = bytes(32)


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
        """What is visible is whole, and rank zero believes no record there that is not."""
        pool = self._pool
        for manifest in pool.manifests():
            record = manifest.record
            if manifest_name(_NAMESPACE, record.key) in pool.damaged:
                continue
            if len(manifest.shards) != len(self._ranks):
                raise Violation("visible only whole", f"{record.key.hex()[:16]} has {len(manifest.shards)} shards")
            for rank in self._ranks:
                name = pool.name_of(record, rank)
                if name in pool.damaged:
                    continue
                data = pool.objects.get(name)
                problem = "missing" if data is None else pool.shard_problem(record, manifest.extent, rank, data)
                if problem is not None:
                    raise Violation("visible only whole", f"{record.key.hex()[:16]} on rank {rank}: {problem}")
        store = group.leader.store
        local = store._records[Tier.DISK].index.records() if store is not None else iter(())
        for one in local:
            if one.in_pool and one.key not in pool.committed:
                raise Violation("said to be in the pool", f"{one.key.hex()[:16]} never was")

    def check_at_rest(self, group: Group) -> None:
        """Every rank is in the session of rank zero, and nothing is pending."""
        session = group.leader.pool_session
        if session is None or any(self._on.get(rank) != session for rank in self._ranks):
            where = {rank: self._on.get(rank, b"").hex()[:8] for rank in self._ranks}
            raise Violation("pool mixed", f"at rest ranks are in {where}, rank 0 in {(session or b'').hex()[:8]}")
