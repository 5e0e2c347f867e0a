"""The cluster at one moment, as ``/v1/cluster``, ``flare status`` and ``/metrics`` show it. One frozen value.

The worker makes it; it travels to the API process as msgpack and to clients as JSON. Fields are only added.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "CacheTierSnapshot",
    "ClusterSnapshot",
    "PageSnapshot",
    "RankSnapshot",
    "RequestSnapshot",
    "TokenSnapshot",
]


class PageSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Device pages of every rank (their ids are the same everywhere).

    ``free + held + cached + quarantined == total`` at every moment.
    """

    total: int = 0
    free: int = 0
    held: int = 0
    cached: int = 0
    quarantined: int = 0


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Requests now, and since the start."""

    running: int = 0
    waiting: int = 0
    finished_total: int = 0
    cancelled_total: int = 0
    failed_total: int = 0
    preempted_total: int = 0


class TokenSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens since the start. Of ``lookup_total`` prompt tokens looked up, ``hit_total`` were restored, by tier."""

    prompt_total: int = 0
    output_total: int = 0
    lookup_total: int = 0
    hit_total: dict[str, int] = {}


class CacheTierSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of records: bytes are those of the largest rank's files, the limit is the agreed one."""

    tier: str
    num_records: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0
    num_jobs_outstanding: int = 0
    stores_dropped_total: int = 0
    jobs_total: dict[str, int] = {}
    failures_total: dict[str, int] = {}


class RankSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. ``steps_behind`` counts from the last step that rank zero planned."""

    rank: int
    host: str = ""
    step: int = 0
    silent_seconds: float = 0.0
    directory: str = ""


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything; ``state`` is starting, ready, draining or lost."""

    state: str
    detail: str = ""
    model: str = ""
    fingerprint: str = ""
    world_size: int = 1
    max_model_len: int = 0
    page_tokens: int = 0
    uptime_seconds: float = 0.0
    steps_total: int = 0
    pages: PageSnapshot = PageSnapshot()
    requests: RequestSnapshot = RequestSnapshot()
    tokens: TokenSnapshot = TokenSnapshot()
    tiers: tuple[CacheTierSnapshot, ...] = ()
    ranks: tuple[RankSnapshot, ...] = ()
