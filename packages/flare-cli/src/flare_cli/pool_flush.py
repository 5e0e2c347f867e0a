"""Waits until a running server has put what is pending into the pool. Asks over HTTP; knows no engine."""

from __future__ import annotations

import time

from flare_cli.snapshot import ClusterSnapshot, PoolSnapshot
from flare_cli.status import fetch_snapshot
from flare_core.errors import FlareError

__all__ = ["wait_for_flush"]

POLL_SECONDS = 0.2


def wait_for_flush(url: str, key_file: str | None, *, timeout_seconds: float) -> PoolSnapshot:
    """Block until the server at ``url`` has nothing pending for its pool; how it stood then.

    Raises:
        UsageError, FlareError: as :func:`fetch_snapshot`; the server has no pool; or something was still pending when
            the time was over, with the reason where the pool is off.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        pool = _pool_of(fetch_snapshot(url, key_file)[0], url)
        num_left = pool.pending + pool.backlog
        if not num_left:
            return pool
        if time.monotonic() >= deadline:
            why = "; ".join(
                f"{'every rank' if rank == 'all' else 'rank ' + rank}: {r}" for rank, r in pool.reasons.items()
            )
            state = f"the pool is {pool.state}{': ' + why if why else ''}"
            msg = f"{num_left} records were still pending after {timeout_seconds:g} s; {state}"
            raise FlareError(msg)
        time.sleep(POLL_SECONDS)


def _pool_of(snapshot: ClusterSnapshot, url: str) -> PoolSnapshot:
    pool = None if snapshot.cache is None else snapshot.cache.pool
    if pool is None:
        msg = f"the server at {url} was started without --pool"
        raise FlareError(msg)
    return pool
