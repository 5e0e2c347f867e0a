"""The words of the manager's machine: its limits, a transfer, and what it asks of its shell."""

from __future__ import annotations

from dataclasses import dataclass, field

from flare_cache.jobs import RecordIdentity
from flare_cache.pool.manifest import Extent, Manifest
from flare_cache.pool.messages import Reply

__all__ = [
    "Answer",
    "CheckShard",
    "CoreEffect",
    "DeleteObjects",
    "LandShard",
    "PoolLimits",
    "PutManifest",
    "ShardFacts",
    "Transfer",
]


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of a manager.

    Attributes:
        limit_bytes: of all namespaces; None: none.
        quota_bytes: of each namespace; None: none.
        max_shard_bytes: of one shard.
        max_pending_bytes: of shards that are being received, which are in memory.
        transfer_seconds: how long a grant is good for: longer than any job's budget.
        grace_seconds: from a manifest's deletion until its shards go: longer than a grant is good for.
        wall_clock_offset: Unix seconds minus the machine's clock, for ``created_at``.
    """

    limit_bytes: int | None = None
    quota_bytes: int | None = None
    max_shard_bytes: int = 1 << 30
    max_pending_bytes: int = 2 << 30
    transfer_seconds: float = 130.0
    grace_seconds: float = 300.0
    wall_clock_offset: float = 0.0


@dataclass(slots=True, eq=False)
class Transfer:
    """A granted transfer of one shard. ``record`` is None for a get.

    Attributes:
        id: names it; 16 bytes.
        session: of the link that it was granted on.
        namespace, set_fingerprint, rank, world_size: of whoever asked.
        name: of the object.
        num_bytes: of the object.
        expires_at: when it becomes void.
        ranges: what units have asked for; no byte twice.
        is_landing: a put whose shard is being verified and stored.
    """

    id: bytes
    session: bytes
    namespace: bytes
    set_fingerprint: bytes
    rank: int
    world_size: int
    name: str
    num_bytes: int
    record: RecordIdentity | None
    extent: Extent
    expires_at: float
    ranges: list[tuple[int, int]] = field(default_factory=list)
    num_received: int = 0
    is_landing: bool = False

    def claim(self, offset: int, length: int) -> bool:
        """Give out a range, once; False where it is none, or overlaps one that was given out."""
        end = offset + length
        if length <= 0 or offset < 0 or end > self.num_bytes:
            return False
        if any(offset < other_end and other < end for other, other_end in self.ranges):
            return False
        self.ranges.append((offset, end))
        return True

    @property
    def is_whole(self) -> bool:
        """Every byte of a put has come."""
        return self.num_received == self.num_bytes


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What a verified shard says of itself."""

    record: RecordIdentity
    extent: Extent
    token_ids: bytes
    invariant_digest: bytes
    num_bytes: int
    header_digest: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Send a reply on the link of a session."""

    session: bytes
    number: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class LandShard:
    """Verify what was received, put it into storage, and tell :meth:`PoolCore.landed`."""

    transfer: Transfer
    number: int


@dataclass(frozen=True, slots=True)
class PutManifest:
    """Put a manifest if absent, and tell :meth:`PoolCore.manifest_put`."""

    namespace: bytes
    key: bytes
    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class CheckShard:
    """Verify a stored shard, and tell :meth:`PoolCore.checked`."""

    namespace: bytes
    manifest: Manifest
    rank: int
    set_fingerprint: bytes
    session: bytes
    number: int


@dataclass(frozen=True, slots=True)
class DeleteObjects:
    """Delete objects from storage, and from memory."""

    names: tuple[str, ...]


CoreEffect = Answer | LandShard | PutManifest | CheckShard | DeleteObjects
