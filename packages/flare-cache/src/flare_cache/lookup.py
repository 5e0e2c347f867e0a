"""The longest prefix of a prompt that records can restore, over several tiers. Pure; changes nothing.

Pages are taken from the cheapest tier that has them, so that a restored prefix may come part from memory and part
from disk. Models without rows also copy part of the page or tail in which the prompt diverges; a model with rows
resumes only where some record ends with a row that every rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flare_cache.index import Record, RecordIndex
from flare_core.prefix import PrefixQuery, Restorable, Segment, Tier

__all__ = ["TierIndex", "deepest_record", "find_restorable"]


@dataclass(frozen=True, slots=True)
class TierIndex:
    """A tier and its index."""

    tier: Tier
    index: RecordIndex


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one section comes from."""

    tier: Tier
    record: Record


def find_restorable(
    query: PrefixQuery, tiers: Sequence[TierIndex], *, page_tokens: int, has_rows: bool, min_tokens: int = 1
) -> Restorable:
    """The longest restorable prefix beyond the device's share.

    Args:
        query: the prompt; its token ids are the limit.
        tiers: cheapest first.
        page_tokens: tokens of a whole page.
        has_rows: the model resumes only at rows.
        min_tokens: a restore that adds fewer tokens is not worth a job.
    """
    walk = _Walk(query, tiers, page_tokens)
    segments, num_tokens = walk.to_row() if has_rows else walk.to_divergence()
    if num_tokens - query.num_device_tokens < max(1, min_tokens):
        return Restorable((), query.num_device_tokens)
    return Restorable(segments, num_tokens)


def deepest_record(query: PrefixQuery, index: RecordIndex) -> Record | None:
    """The record that holds the deepest whole page of the prompt, for the order of use."""
    num_pages = index.num_present(query.keys)
    return index.holder(query.keys[num_pages - 1]) if num_pages else None


class _Walk:
    """One lookup: the whole pages from the device's share on, and where each comes from."""

    def __init__(self, query: PrefixQuery, tiers: Sequence[TierIndex], page_tokens: int) -> None:
        self._query = query
        self._tiers = tiers
        self._page_tokens = page_tokens
        self._first_page = query.num_device_pages

    def to_divergence(self) -> tuple[tuple[Segment, ...], int]:
        """Whole pages, then a copy of part of the page or tail that shares most with what follows."""
        places = self._whole_pages()
        num_pages = self._first_page + len(places)
        num_tokens = num_pages * self._page_tokens
        boundary, ids = self._behind(num_pages)
        best: tuple[int, Tier, Record, int] | None = None
        for tier in self._tiers:
            run = tier.index.longest_run(boundary, num_pages, ids)
            if run is not None and (best is None or run.num_tokens > best[0]):
                best = (run.num_tokens, tier.tier, run.record, run.section)
        if best is not None:
            num_tokens += best[0]
            return self._segments(places, num_tokens, (_Place(best[1], best[2]), best[3])), num_tokens
        return self._segments(places, num_tokens), num_tokens

    def to_row(self) -> tuple[tuple[Segment, ...], int]:
        """The deepest record end with a row: a tail behind a whole page, or a whole page itself."""
        places = self._whole_pages()
        for num_pages in range(self._first_page + len(places), self._first_page - 1, -1):
            boundary, ids = self._behind(num_pages)
            for tier in self._tiers:
                record = tier.index.row_tail(boundary, ids)
                if record is None:
                    record = tier.index.get(boundary)
                    if record is None or not (record.has_row and record.is_stored and record.is_usable):
                        continue
                end = record.identity.end
                if end > self._query.num_device_tokens:
                    return self._row_segments(places[: num_pages - self._first_page], _Place(tier.tier, record)), end
        return (), self._query.num_device_tokens

    def _whole_pages(self) -> list[_Place]:
        places: list[_Place] = []
        current: _Place | None = None
        holders = [(tier.tier, tier.index.holder) for tier in self._tiers]
        for key in self._query.keys[self._first_page :]:
            for tier, holder in holders:
                record = holder(key)
                if record is not None and record.is_stored:
                    if current is None or current.record is not record:
                        current = _Place(tier, record)
                    places.append(current)
                    break
            else:
                break
        return places

    def _behind(self, num_pages: int) -> tuple[bytes, bytes]:
        """The boundary behind ``num_pages`` pages, and up to a page of ids that follow."""
        boundary = self._query.keys[num_pages - 1] if num_pages else self._query.root
        start = num_pages * self._page_tokens
        return boundary, self._query.token_ids[start : start + self._page_tokens].tobytes()

    def _row_segments(self, places: list[_Place], end: _Place) -> tuple[Segment, ...]:
        """``places`` and then the sections of the record at whose end the row is, all of them from its own file."""
        record = end.record
        own_from = max(self._first_page, record.first_page)
        inherited = places[: own_from - self._first_page]
        num_sections = record.identity.num_sections - (own_from - record.first_page)
        segments = list(self._segments(inherited, own_from * self._page_tokens))
        base = max(own_from * self._page_tokens, self._query.num_device_tokens)
        segments.append(
            Segment(
                record_key=record.key,
                tier=end.tier,
                first_section=own_from - record.first_page,
                num_sections=num_sections,
                first_page=own_from,
                num_tokens=record.identity.end - base,
                with_row=True,
            )
        )
        return tuple(segments)

    def _segments(
        self, places: list[_Place], num_tokens: int, partial: tuple[_Place, int] | None = None
    ) -> tuple[Segment, ...]:
        """Runs of consecutive sections of one record; ``partial`` follows the whole pages."""
        sections = [(place, self._first_page + at - place.record.first_page) for at, place in enumerate(places)]
        if partial is not None:
            sections.append(partial)
        segments: list[Segment] = []
        reached = self._query.num_device_tokens
        at = 0
        while at < len(sections):
            place, first = sections[at]
            until = at + 1
            while (
                until < len(sections)
                and sections[until][0].record is place.record
                and sections[until][1] == first + until - at
            ):
                until += 1
            end = min((self._first_page + until) * self._page_tokens, num_tokens)
            segments.append(
                Segment(place.record.key, place.tier, first, until - at, self._first_page + at, end - reached)
            )
            reached = end
            at = until
        return tuple(segments)
