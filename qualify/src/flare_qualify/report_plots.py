"""The report's plots as inline SVG: time to restore by tokens, and when which fault was injected.

Values in, text out; colours come from the report's style sheet by class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Mark", "Restore", "fault_timeline", "restore_plot"]

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 74, 16, 14, 46


@dataclass(frozen=True, slots=True)
class Restore:
    """One restore hit: prompt tokens restored, seconds to the first token, tier, and the scenario it was in.

    A cold run is one, too, of the tier ``cold``: what a restore is to be compared with.
    """

    tokens: int
    seconds: float
    tier: str
    scenario: str


@dataclass(frozen=True, slots=True)
class Mark:
    """One injected fault at ``seconds`` since the run began; ``family`` is the first word of ``what``."""

    seconds: float
    scenario: str
    what: str
    evidence: str

    @property
    def family(self) -> str:
        """``kill``, ``stop``, ``failpoint``, …"""
        return self.what.split()[0].split(":")[0] if self.what else "other"


@dataclass(frozen=True, slots=True)
class _LogAxis:
    """Maps values to pixels by their logarithm, over whole decades."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> _LogAxis:
        low = math.floor(math.log10(max(min(values), 1e-4)))
        high = math.ceil(math.log10(max(values)))
        return cls(low, max(high, low + 1), start, end)

    def at(self, value: float) -> float:
        share = (math.log10(max(value, 1e-4)) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        steps = (1, 2, 5) if self.high - self.low < 3 else (1,)
        found = [step * 10.0**power for power in range(int(self.low), int(self.high) + 1) for step in steps]
        return [tick for tick in found if tick <= 10.0**self.high]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def restore_plot(restores: Sequence[Restore]) -> str:
    """Seconds to the first token over tokens restored, both logarithmic; a colour for each tier."""
    if not restores:
        return "<p>No restore hit was seen.</p>"
    height = 380
    x = _LogAxis.over([restore.tokens for restore in restores], _LEFT, _WIDTH - _RIGHT)
    y = _LogAxis.over([restore.seconds for restore in restores], height - _BOTTOM, _TOP)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="time to restore">']
    for tick in x.ticks():
        parts.append(f'<line class="grid" x1="{x.at(tick):.1f}" x2="{x.at(tick):.1f}" y1="{_TOP}" y2="{y.start}"/>')
        parts.append(f'<text x="{x.at(tick):.1f}" y="{y.start + 18}" text-anchor="middle">{_number(tick)}</text>')
    for tick in y.ticks():
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{x.end}" y1="{y.at(tick):.1f}" y2="{y.at(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y.at(tick) + 4:.1f}" text-anchor="end">{_number(tick)} s</text>')
    for restore in restores:
        title = f"{restore.scenario}: {restore.tokens} tokens, {restore.tier}, {restore.seconds:.3f} s"
        parts.append(
            f'<circle class="tier-{escape(restore.tier)}" cx="{x.at(restore.tokens):.1f}" '
            f'cy="{y.at(restore.seconds):.1f}" r="3.5"><title>{escape(title)}</title></circle>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{height - 6}" text-anchor="middle">prompt tokens</text>')
    parts.append("</svg>")
    return "".join(parts)


def fault_timeline(marks: Sequence[Mark], total_seconds: float) -> str:
    """A lane for each scenario with a fault; every fault a mark at its time, with what showed that it fired."""
    if not marks:
        return "<p>No fault was injected.</p>"
    lanes = list(dict.fromkeys(mark.scenario for mark in sorted(marks, key=lambda mark: mark.seconds)))
    left, lane_height = 300, 20
    height = _TOP + lane_height * len(lanes) + _BOTTOM
    span = max(total_seconds, 1.0, *(mark.seconds for mark in marks))
    bottom = height - _BOTTOM

    def place(seconds: float) -> float:
        return left + (_WIDTH - _RIGHT - left) * seconds / span

    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="faults over time">']
    for tick in _time_ticks(span):
        parts.append(f'<line class="grid" x1="{place(tick):.1f}" x2="{place(tick):.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{place(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{_clock(tick)}</text>')
    for number, lane in enumerate(lanes):
        middle = _TOP + lane_height * (number + 0.5)
        parts.append(f'<text x="{left - 10}" y="{middle + 4}" text-anchor="end">{escape(lane)}</text>')
        parts.append(f'<line class="lane" x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{middle}" y2="{middle}"/>')
    for mark in marks:
        middle = _TOP + lane_height * (lanes.index(mark.scenario) + 0.5)
        title = escape(f"{_clock(mark.seconds)} {mark.what}: {mark.evidence}")
        parts.append(
            f'<rect class="fault" x="{place(mark.seconds) - 1.5:.1f}" y="{middle - 7}" width="3" height="14">'
            f"<title>{title}</title></rect>"
        )
    label = left + (_WIDTH - _RIGHT - left) / 2
    parts.append(f'<text x="{label}" y="{height - 6}" text-anchor="middle">time since the run began</text></svg>')
    return "".join(parts)


def _time_ticks(span: float) -> list[float]:
    step = next((step for step in (10, 30, 60, 120, 300, 600, 1800, 3600, 7200) if span / step <= 10), 14400)
    return [float(step * number) for number in range(int(span // step) + 1)]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
