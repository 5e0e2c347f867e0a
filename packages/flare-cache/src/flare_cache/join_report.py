"""What a join came to: the agreed limits, and what was kept, dropped and left on each rank. Every rank logs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from flare_cache.settings import Statement

__all__ = ["JoinReport", "RankReport", "agreed_limits", "disk_limit_of"]

_USABLE_FRACTION = 0.8


class RankReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's share.

    Attributes:
        rank: whose.
        directory: its path; empty without a disk tier.
        disk_limit_bytes: the limit it was given or derived.
        is_limit_derived: from free space.
        memory_bytes: its memory limit; 0 without a memory tier.
        verdicts: records by verdict ("kept", "missing", "differs", "orphaned", "empty", "over-limit", "damaged").
        num_truncated: kept records whose tail or row some rank lacked.
        num_left: files of a newer format or another set, left alone.
    """

    rank: int
    directory: str
    disk_limit_bytes: int
    is_limit_derived: bool
    memory_bytes: int
    verdicts: dict[str, int]
    num_truncated: int
    num_left: int


class JoinReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of it.

    Attributes:
        set_id: 16 bytes; empty without a disk tier.
        num_kept, kept_bytes: records, and what they take on the rank where they are largest.
        left_bytes: files left alone, on the rank where they are most; charged against the limit too.
        disk_limit_bytes, memory_limit_bytes: agreed; 0 without the tier.
        ranks: by rank.
    """

    set_id: bytes
    num_kept: int
    kept_bytes: int
    left_bytes: int
    disk_limit_bytes: int
    memory_limit_bytes: int
    ranks: list[RankReport]

    def lines(self) -> Iterator[str]:
        """Lines for a log."""
        if self.disk_limit_bytes:
            limits = ", ".join(
                f"rank {rank.rank} {rank.disk_limit_bytes}{' derived from free space' if rank.is_limit_derived else ''}"
                for rank in self.ranks
            )
            yield f"agreed disk limit: {self.disk_limit_bytes} bytes a rank ({limits})"
            yield f"kept {self.num_kept} records, {self.kept_bytes} bytes on the rank where they are largest"
        if self.memory_limit_bytes:
            yield f"agreed memory limit: {self.memory_limit_bytes} bytes a rank"
        for rank in self.ranks:
            dropped = ", ".join(
                f"{number} {verdict}"
                for verdict, number in sorted(rank.verdicts.items())
                if verdict != "kept" and number
            )
            notes = [f"dropped {dropped}"] if dropped else []
            notes += [f"truncated {rank.num_truncated}"] if rank.num_truncated else []
            notes += [f"left {rank.num_left} files of another set or format alone"] if rank.num_left else []
            if notes:
                yield f"rank {rank.rank} ({rank.directory}): {'; '.join(notes)}"


def disk_limit_of(statement: Statement, statements: Sequence[Statement]) -> int:
    """The limit a rank was given, or its share of 0.8 of what its file system can hold of records."""
    if statement.disk_limit_bytes:
        return statement.disk_limit_bytes
    sharing = [other for other in statements if other.file_system == statement.file_system]
    own = sum(other.record_bytes + other.left_bytes for other in sharing)
    return int(_USABLE_FRACTION * (statement.free_bytes + own)) // len(sharing)


def agreed_limits(statements: Sequence[Statement]) -> tuple[int, int]:
    """The smallest disk and memory limits among the ranks."""
    return (
        min(disk_limit_of(statement, statements) for statement in statements),
        min(statement.memory_bytes for statement in statements),
    )
