"""What one seed means: the whole set of options, drawn once and printed for a seed that fails.

Swarm testing (Groce et al., ISSTA 2012): each seed has a random subset of the kinds of faults, each at its own rate,
because faults that always come together hide each other.
"""

from __future__ import annotations

import enum
from random import Random

import msgspec

__all__ = ["FAULT_KINDS", "POOL_KINDS", "FaultKind", "Options", "expand"]


class FaultKind(enum.StrEnum):
    """Kinds of faults and of disturbances."""

    KILL = "kill"
    KILL_IN_CALL = "kill-in-call"
    POWER_CUT = "power-cut"
    BLACKOUT = "blackout"
    FREEZE = "freeze"
    LINK_CUT = "link-cut"
    LINK_STALL = "link-stall"
    ONE_WAY_LOSS = "one-way-loss"
    DUPLICATE_FRAME = "duplicate-frame"
    STALE_FRAME = "stale-frame"
    READ_EIO = "read-eio"
    READ_FLIP = "read-flip"
    MISDIRECTED_READ = "misdirected-read"
    BIT_ROT = "bit-rot"
    WRITE_EIO = "write-eio"
    FSYNC_EIO = "fsync-eio"
    NAME_EIO = "name-eio"
    DISK_FULL = "disk-full"
    SHORT_IO = "short-io"
    SLOW_DISK = "slow-disk"
    SLOW_DEVICE = "slow-device"
    DEVICE_FAULT = "device-fault"
    DIVERGENCE = "divergence"
    RESTART = "restart"
    CANCEL = "cancel"
    RESET = "reset"
    POOL_CRASH = "pool-crash"
    POOL_CUT = "pool-cut"
    POOL_REFUSAL = "pool-refusal"
    POOL_SLOW = "pool-slow"
    POOL_FULL = "pool-full"
    POOL_EVICTION = "pool-eviction"
    POOL_ROT = "pool-rot"
    POOL_ALONE = "pool-alone"


FAULT_KINDS = tuple(FaultKind)
POOL_KINDS = tuple(kind for kind in FAULT_KINDS if kind.startswith("pool-"))


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A world.

    Attributes:
        seed: of everything drawn while it runs.
        num_events: events of the phase with faults.
        world_size, page_tokens, num_pages, max_sequences, lead: of the group and its engine.
        has_rows, num_row_snapshots, is_uneven: of the model.
        memory_records, disk_records: limits of the tiers, in records of the largest size; 0 memory: no such tier.
        max_sections: of a record.
        min_tail_tokens: as the setting.
        is_power_durable: durability "power".
        part_pages: pages of one read or write.
        is_staged: pages are reached through staging buffers, as on CUDA.
        num_threads: tasks that a rank's disk runs at a time.
        num_documents, document_pages, max_tokens, request_seconds: of the workload.
        max_prefill_tokens: of a step.
        max_outstanding: credits.
        latency_seconds, step_seconds, task_seconds: scales of delays.
        num_seeded: records found at the first start, on all ranks or on some.
        faults: kinds and weights.
        fault_events: mean number of events between two faults.
        call_fault_rate: of each kind of failing disk call.
        has_pool: the ranks share a pool. pool_records: that may wait to be put, in records of the largest size;
            pool_limit_records: that the manager keeps, 0: any number.
    """

    seed: int
    num_events: int
    world_size: int
    page_tokens: int
    num_pages: int
    max_sequences: int
    lead: int
    has_rows: bool
    num_row_snapshots: int
    is_uneven: bool
    memory_records: int
    disk_records: int
    max_sections: int
    min_tail_tokens: int
    is_power_durable: bool
    part_pages: int
    is_staged: bool
    num_threads: int
    num_documents: int
    document_pages: int
    max_tokens: int
    request_seconds: float
    max_prefill_tokens: int
    max_outstanding: int
    latency_seconds: float
    step_seconds: float
    task_seconds: float
    num_seeded: int
    faults: dict[FaultKind, float]
    fault_events: float
    call_fault_rate: float
    has_pool: bool = False
    pool_records: int = 8
    pool_limit_records: int = 0


def expand(seed: int, *, num_events: int = 1000) -> Options:
    """The options of ``seed``."""
    rng = Random(f"options {seed}")  # noqa: S311 - repeatable chance is what is wanted
    page_tokens = rng.choice((2, 4, 4, 8))
    share = rng.choice((0.05, 0.2, 0.4, 0.8))
    faults = {
        kind: rng.choice((0.3, 1.0, 1.0, 3.0))
        for kind in FAULT_KINDS
        if kind not in POOL_KINDS and rng.random() < share
    }
    # Chance of its own, so that what a seed means otherwise stays the same.
    pool_rng = Random(f"pool {seed}")  # noqa: S311 - as above
    has_pool = pool_rng.random() < 0.5
    if has_pool:
        # Without a cleared disk now and then, local tiers would answer nearly everything.
        shares = dict.fromkeys(POOL_KINDS, share) | {FaultKind.POOL_ALONE: 0.5}
        faults |= {kind: pool_rng.choice((0.3, 1.0, 3.0)) for kind in POOL_KINDS if pool_rng.random() < shares[kind]}
    return Options(
        seed=seed,
        num_events=num_events,
        world_size=rng.choice((2, 2, 2, 2, 3, 3, 4, 5, 8)),
        page_tokens=page_tokens,
        num_pages=rng.choice((4, 8, 12, 16, 24, 32, 64)),
        max_sequences=rng.choice((1, 2, 3, 4)),
        lead=rng.choice((0, 1)),
        has_rows=rng.random() < 0.35,
        num_row_snapshots=rng.choice((1, 2, 4, 8)),
        is_uneven=rng.random() < 0.2,
        memory_records=rng.choice((0, 0, 2, 5, 20)),
        disk_records=rng.choice((3, 4, 6, 10, 40)),
        max_sections=rng.choice((1, 2, 3, 6)),
        min_tail_tokens=rng.choice((0, 1, 2)),
        is_power_durable=rng.random() < 0.4,
        part_pages=rng.choice((1, 1, 2, 8)),
        is_staged=rng.random() < 0.5,
        num_threads=rng.choice((1, 2, 4)),
        num_documents=rng.choice((1, 2, 2, 3)),
        document_pages=rng.choice((2, 3, 4, 6)),
        max_tokens=rng.choice((1, 2, 4, 6)),
        request_seconds=rng.choice((0.005, 0.02, 0.06)),
        max_prefill_tokens=rng.choice((2, 4, 8, 32)) * page_tokens,
        max_outstanding=rng.choice((1, 2, 8)),
        latency_seconds=rng.choice((0.0002, 0.001, 0.004)),
        step_seconds=rng.choice((0.001, 0.004, 0.01)),
        task_seconds=rng.choice((0.0005, 0.002, 0.01)),
        num_seeded=rng.choice((0, 0, 3, 8)),
        faults=faults,
        fault_events=rng.choice((40.0, 80.0, 150.0, 300.0)),
        call_fault_rate=rng.choice((0.01, 0.03, 0.1)),
        has_pool=has_pool,
        pool_records=pool_rng.choice((1, 3, 8, 40)),
        pool_limit_records=pool_rng.choice((0, 0, 3, 10)),
    )
