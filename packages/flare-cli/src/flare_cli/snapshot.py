"""The cluster at one moment, as ``/v1/cluster``, ``flare status`` and ``/metrics`` show it. One frozen value.

The worker makes it; it travels to the API process as msgpack and to clients as JSON. Fields are only added.
"""

from __future__ import annotations

import msgspec

from flare_core.engine.statistics import EngineSnapshot

__all__ = ["CacheSnapshot", "ClusterSnapshot", "JobSnapshot", "PoolSnapshot", "RankSnapshot", "TierSnapshot"]


class TierSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of records. Bytes are those of the rank where they are most; the limit is the agreed one.

    ``stores_stopped``, ``reads_stopped``: why the tier takes or gives nothing now, a full or failing disk; else None.
    """

    tier: str
    num_records: int
    charged_bytes: int
    limit_bytes: int
    num_stores_pending: int = 0
    num_fetches_pending: int = 0
    records_stored: int = 0
    records_evicted: int = 0
    records_failed: int = 0
    stores_stopped: str | None = None
    reads_stopped: str | None = None


class JobSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer jobs of one rank and operation since the start.

    ``counts`` by bucket of ``flare_cache.job_times.BUCKET_SECONDS``; ``failures`` by reason.
    """

    rank: int
    op: str
    counts: tuple[int, ...]
    sum_seconds: float
    num_bytes: int
    failures: dict[str, int] = {}


class PoolSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The pool as this group sees it. Bytes are those of the rank where they are most.

    ``state``: off, joining or on, on every rank; ``reasons``: why it is off, by rank, "all" for everybody;
    ``state_seconds``: since it came on or went off; ``sessions``: times that it came on. ``records_in_pool``: of the
    tier that is put from; ``pending``: to be put, with ``pending_keys`` of the first of them; ``backlog``: found
    missing in the pool, waiting for room among the pending; ``dropped``: never put, by reason. ``restores_refused``:
    not worth it by latency and rates, which are None until measured. ``records``, where asked for: "in-pool", "pending"
    or "absent" by key, of the tier that is put from.
    """

    url: str
    state: str
    reasons: dict[str, str] = {}
    state_seconds: float = 0.0
    sessions: int = 0
    records_in_pool: int = 0
    records_known: int = 0
    pending: int = 0
    pending_bytes: int = 0
    pending_limit_bytes: int = 0
    pending_keys: tuple[str, ...] = ()
    backlog: int = 0
    records_put: int = 0
    dropped: dict[str, int] = {}
    lookups: int = 0
    lookups_unanswered: int = 0
    restores_refused: int = 0
    pool_latency_seconds: float | None = None
    pool_bytes_per_second: float | None = None
    prefill_tokens_per_second: float | None = None
    records: dict[str, str] | None = None


class CacheSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The record path. ``stores_dropped`` by reason; ``join`` is the number of records found at start, by verdict."""

    tiers: tuple[TierSnapshot, ...]
    jobs: tuple[JobSnapshot, ...] = ()
    stores_dropped: dict[str, int] = {}
    join: dict[str, int] = {}
    num_jobs_waiting: int = 0
    num_jobs_outstanding: int = 0
    pool: PoolSnapshot | None = None


class RankSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. ``silent_seconds``: since its last heartbeat; ``step``: the last step it has reported."""

    rank: int
    address: str
    step: int = 0
    silent_seconds: float = 0.0


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. ``state`` is starting, ready, draining or lost, ``detail`` says more.

    At every moment the engine's pages, free, held, cached and quarantined, add up to ``num_pages``. ``poisoned``: times
    that the engine was lost while it served, by reason; for as long as the server's process lives.
    """

    state: str
    detail: str = ""
    model: str = ""
    fingerprint: str = ""
    world_size: int = 1
    max_model_len: int = 0
    page_tokens: int = 0
    num_pages: int = 0
    uptime_seconds: float = 0.0
    engine: EngineSnapshot | None = None
    cache: CacheSnapshot | None = None
    ranks: tuple[RankSnapshot, ...] = ()
    poisoned: dict[str, int] = {}
