"""What a rank says of itself at join, and what of it must be equal on every rank. Compares; reads no flag or file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from flare_cache.disk_shelf import Durability
from flare_cache.record import FORMAT
from flare_cache.record_plan import DEFAULT_RECORD_BYTES
from flare_core.geometry import SetIdentity

__all__ = ["DEFAULT_MIN_TAIL_TOKENS", "CacheSettings", "Statement", "describe_mismatches"]

DEFAULT_MIN_TAIL_TOKENS = 16
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The record path's settings on one rank.

    Attributes:
        identity: the record set, as this rank computed it.
        salt_key_id: 16 bytes.
        has_disk: ``--prefix-cache-disk`` was given.
        disk_limit_bytes: ``--prefix-cache-disk-limit``, or None to derive one.
        memory_bytes: ``--prefix-cache-memory``, or None.
        min_tail_tokens, max_record_bytes, durability: must be equal on every rank.
        accept_loss: ``--prefix-cache-accept-loss``; rank zero's counts.
        others: further settings that must be equal on every rank, by name.
    """

    identity: SetIdentity
    salt_key_id: bytes
    has_disk: bool = False
    disk_limit_bytes: int | None = None
    memory_bytes: int | None = None
    min_tail_tokens: int = DEFAULT_MIN_TAIL_TOKENS
    max_record_bytes: int = DEFAULT_RECORD_BYTES
    durability: Durability = Durability.PROCESS
    accept_loss: bool = False
    others: Mapping[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, str]:
        """Readable values of everything that must be equal on every rank."""
        return {
            **self.identity.fields(),
            "record_format": str(FORMAT),
            "prefix_cache_disk": "given" if self.has_disk else "absent",
            "prefix_cache_memory": "absent" if self.memory_bytes is None else "given",
            "prefix_cache_min_tail": str(self.min_tail_tokens),
            "prefix_cache_record_bytes": str(self.max_record_bytes),
            "prefix_cache_durability": str(self.durability),
            "prefix_cache_salt_key_id": self.salt_key_id.hex(),
            **self.others,
        }


class Statement(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank tells rank zero before anything is agreed.

    Attributes:
        rank: who says it.
        fields: :meth:`CacheSettings.fields`.
        layout: layout fingerprint of the rank's own geometry.
        memory_bytes: as given; 0 without a memory tier.
        disk_limit_bytes: as given, 0 to derive one; the next four are 0 and empty without a disk tier.
        free_bytes: of the directory's file system.
        file_system: equal on ranks whose directories share free space.
        directory: path, for messages.
        set_id: of the directory's set.json; empty in a new directory.
        record_bytes, left_bytes: files of sound records; files of a newer format or another set.
        num_records: sound records, which the scan's chunks then list.
    """

    rank: int
    fields: dict[str, str]
    layout: bytes
    memory_bytes: int = 0
    disk_limit_bytes: int = 0
    free_bytes: int = 0
    file_system: str = ""
    directory: str = ""
    set_id: bytes = b""
    record_bytes: int = 0
    left_bytes: int = 0
    num_records: int = 0


def describe_mismatches(statements: Sequence[Statement]) -> list[str]:
    """One line for each field on which some rank differs from rank zero, with both values and the ranks.

    ``statements`` are by rank. A rank's own layout is held against what rank zero computed for it.
    """
    first = statements[0]
    lines: list[str] = []
    for name in sorted({name for statement in statements for name in statement.fields}):
        expected = first.fields.get(name, "absent")
        for statement in statements[1:]:
            found = statement.fields.get(name, "absent")
            if found != expected:
                lines.append(
                    f"{name}: rank 0 has {_shown(expected, found)}, rank {statement.rank} has {_shown(found, expected)}"
                )
    for statement in statements:
        planned = first.fields.get(f"layout[{statement.rank}]", "absent")
        if statement.layout.hex() != planned:
            found = statement.layout.hex()
            lines.append(
                f"layout: rank {statement.rank} must have {_shown(planned, found)}, has {_shown(found, planned)}"
            )
    return lines


def _shown(value: str, other: str) -> str:
    """A value short enough to read, and long enough to tell from the other one."""
    if len(value) <= _SHOWN_CHARACTERS or value[:_SHOWN_CHARACTERS] == other[:_SHOWN_CHARACTERS]:
        return value
    return f"{value[:_SHOWN_CHARACTERS]}…"
