"""Words that scheduler and prefix store share: what can be restored, what is to be stored, what became of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flare_core.keys import TokenIds

__all__ = [
    "FetchFinished",
    "LookupReady",
    "PrefixQuery",
    "Restorable",
    "Segment",
    "StoreEvent",
    "StoreFinished",
    "StoreRequest",
    "Tier",
]


class Tier(enum.StrEnum):
    """Where a restored token came from."""

    DEVICE = "device"
    MEMORY = "memory"
    DISK = "disk"
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A prompt to look up.

    Attributes:
        root: root key (set fingerprint and salt).
        token_ids: the tokens that may be restored, [0, n-1) of a prompt of n.
        keys: chain keys of the whole pages of ``token_ids``.
        num_device_tokens: tokens already restored from the device; an answer counts only what goes beyond.
        num_device_pages: whole pages of them: sections are fetched from this page on.
    """

    root: bytes
    token_ids: TokenIds
    keys: Sequence[bytes]
    num_device_pages: int = 0
    num_device_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """What one record contributes: consecutive sections of its file go to consecutive pages of the sequence.

    Attributes:
        record_key: key of the record.
        tier: where it is read from.
        first_section, num_sections: sections of the file; a whole page or, last, the tail.
        first_page: index in the sequence's page table where the first section goes.
        num_tokens: tokens of the sequence that it adds (the last page may be used in part).
        with_row: the record's row is restored too.
    """

    record_key: bytes
    tier: Tier
    first_section: int
    num_sections: int
    first_page: int
    num_tokens: int
    with_row: bool = False


@dataclass(frozen=True, slots=True)
class Restorable:
    """The longest usable prefix beyond the device's; ``num_tokens`` counts from the prompt's start."""

    segments: tuple[Segment, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A computed prefix that may be worth storing.

    Attributes:
        root: root key.
        token_ids: all tokens [0, end) whose KV is computed.
        keys: chain keys of the whole pages of ``token_ids``.
        pages: device page ids of the whole pages, all of them, in order.
        tail_page: a page of its own that holds the ``len(token_ids) % page_tokens`` last tokens, unused slots
            zeroed; None when there is no tail.
        row_slot: the slot that holds the row at ``end``; None for models without rows.
        after_step: last step that writes any of these pages or the row.
    """

    root: bytes
    token_ids: TokenIds
    keys: Sequence[bytes]
    pages: Sequence[int]
    tail_page: int | None
    row_slot: int | None
    after_step: int


@dataclass(frozen=True, slots=True)
class FetchFinished:
    """A fetch ended; its pages may be used or freed.

    Attributes:
        ticket: what ``fetch`` returned.
        num_tokens: tokens of the prompt, from its start, that are now verified on every rank (at least the
            device's share; less than promised after a failure or a cancel).
        tokens_by_tier: how many came from which tier.
        row_restored: the row slot holds the row at ``num_tokens``.
        jobs: transfer jobs that a step using the pages needs (``StepPlan.needs_jobs``).
    """

    ticket: int
    num_tokens: int
    tokens_by_tier: Mapping[Tier, int]
    row_restored: bool
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreFinished:
    """A store ended, whatever its outcome; its pages are unpinned. ``num_records`` were reported."""

    ticket: int
    num_records: int
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class LookupReady:
    """``lookup`` may be asked now: whoever had to be asked for it has answered, or has had its time."""

    ticket: int


StoreEvent = FetchFinished | StoreFinished | LookupReady
