"""How heads, MLP columns and the vocabulary are divided over ranks (design: uneven where they must be).

Pure arithmetic that rank zero and every peer evaluate alike; nothing here knows a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from flare_core.errors import UsageError

__all__ = [
    "MLP_UNIT",
    "VOCAB_UNIT",
    "HeadShard",
    "Span",
    "split_evenly",
    "split_heads",
    "split_mlp",
    "split_vocab",
]

MLP_UNIT = 64
"""MLP columns travel in groups of this many, so that a rank's matrix products stay well shaped."""

VOCAB_UNIT = 1024
"""The vocabulary is divided in blocks of this many ids; a block never straddles two ranks."""


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open interval [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class HeadShard:
    """One rank's heads: the key-value heads [kv.start, kv.stop) and the query heads [query.start, query.stop)."""

    kv: Span
    query: Span


def split_evenly(num_units: int, world_size: int) -> list[Span]:
    """Contiguous spans over ``num_units``, one a rank, sizes differing by at most one, larger first."""
    base, extra = divmod(num_units, world_size)
    spans: list[Span] = []
    start = 0
    for rank in range(world_size):
        stop = start + base + (1 if rank < extra else 0)
        spans.append(Span(start, stop))
        start = stop
    return spans


def split_heads(num_query_heads: int, num_kv_heads: int, world_size: int) -> list[HeadShard]:
    """Heads of every rank.

    With at least as many KV heads as ranks, a rank holds whole groups. With fewer, a rank holds exactly one KV
    head, and the ranks of one KV head divide its query heads.

    Raises:
        UsageError: query heads are not a multiple of KV heads, or there are fewer query heads than ranks.
    """
    if num_query_heads % num_kv_heads:
        msg = f"num_attention_heads {num_query_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        raise UsageError(msg)
    if num_query_heads < world_size:
        msg = f"world size {world_size} is larger than the model's {num_query_heads} query heads; use fewer ranks"
        raise UsageError(msg)
    group = num_query_heads // num_kv_heads
    if num_kv_heads >= world_size:
        return [HeadShard(kv, Span(kv.start * group, kv.stop * group)) for kv in split_evenly(num_kv_heads, world_size)]
    shards: list[HeadShard] = []
    for head, ranks in enumerate(split_evenly(world_size, num_kv_heads)):
        if len(ranks) > group:
            msg = (
                f"world size {world_size} gives KV head {head} {len(ranks)} ranks but it has only {group} query "
                "heads; use fewer ranks"
            )
            raise UsageError(msg)
        shards.extend(
            HeadShard(Span(head, head + 1), Span(head * group + part.start, head * group + part.stop))
            for part in split_evenly(group, len(ranks))
        )
    return shards


def split_units(size: int, unit: int, world_size: int) -> list[Span]:
    """Spans over ``size`` items in whole units; the last unit may be partial, and a rank may be left with none."""
    num_units = -(-size // unit)
    return [
        Span(min(span.start * unit, size), min(span.stop * unit, size)) for span in split_evenly(num_units, world_size)
    ]


def split_mlp(intermediate_size: int, world_size: int) -> list[Span]:
    """MLP columns of every rank, in units of :data:`MLP_UNIT`."""
    return split_units(intermediate_size, MLP_UNIT, world_size)


def split_vocab(vocab_size: int, world_size: int) -> list[Span]:
    """Vocabulary ids of every rank, in blocks of :data:`VOCAB_UNIT`; a small vocabulary may leave ranks empty."""
    return split_units(vocab_size, VOCAB_UNIT, world_size)
