"""The guard against a wrong or a new disk: when a join would cost the group most of its records. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flare_cache.join_set import Summary, common_records
from flare_cache.settings import Statement

__all__ = ["MAX_CRASH_RECORDS", "loss_objection"]

MAX_CRASH_RECORDS = 8
"""So many jobs may be under way when a rank dies: the directories of a group then differ by no more records."""


def loss_objection(summaries: Sequence[Summary], statements: Sequence[Statement]) -> str | None:
    """An objection where over half of the group's bytes would go because some rank's directory is empty; by rank.

    A directory that has belonged to the group may lack what was under way when a rank was killed, during the first
    store of all for example.
    """
    empty = [rank for rank, summary in enumerate(summaries) if len(summary) == 0]
    holding = sorted((summary for summary in summaries if len(summary)), key=lambda one: -sum(one.sizes))
    if not empty or not holding:
        return None
    num_records, num_bytes = common_records(holding)
    if num_records <= MAX_CRASH_RECORDS:
        empty = [rank for rank in empty if not statements[rank].set_id]
    if not empty or 2 * num_bytes <= sum(holding[0].sizes):
        return None
    named = ", ".join(f"rank {rank} ({statements[rank].directory})" for rank in empty)
    return (
        f"{num_bytes} bytes of records a rank would be lost, because the directory of {named} is empty; give the "
        "directory it had, or accept the loss with --prefix-cache-accept-loss"
    )
