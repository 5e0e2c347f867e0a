"""Sizes and durations as people write them on a command line: ``200G``, ``64GiB``, ``500ms``, ``5s``.

Knows no setting and raises :class:`UsageError` with the accepted forms.
"""

from __future__ import annotations

import re

from flare_core.errors import UsageError

__all__ = ["format_duration", "format_size", "parse_duration", "parse_size"]

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$", re.ASCII)
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}{tail}": 1000**power for power, letter in enumerate("kmgtp", 1) for tail in ("", "b")},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_size(text: str) -> int:
    """Bytes of ``200G`` (decimal), ``64GiB`` (binary) or a plain number.

    Raises:
        UsageError: not a size.
    """
    match = _SIZE.match(text)
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        msg = f"{text!r} is not a size; write 200G, 400M (decimal), 64GiB (binary) or a number of bytes"
        raise UsageError(msg)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_duration(text: str) -> float:
    """Seconds of ``500ms``, ``5s``, ``2m``, ``1h`` or a plain number of seconds.

    Raises:
        UsageError: not a duration.
    """
    match = _SIZE.match(text)
    unit = _DURATION_UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        msg = f"{text!r} is not a duration; write 500ms, 5s, 2m or a number of seconds"
        raise UsageError(msg)
    return float(match[1]) * unit


def format_size(num_bytes: int) -> str:
    """``num_bytes`` for people: exact where it is a whole and small number of some unit, else four digits."""
    for base, tail in ((1024, "iB"), (1000, "B")):
        for power, letter in reversed(tuple(enumerate("KMGTP", 1))):
            if num_bytes % base**power == 0 and 0 < num_bytes // base**power < 10_000:
                return f"{num_bytes // base**power} {letter}{tail}"
    for power, letter in reversed(tuple(enumerate("KMGTP", 1))):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:.4g} {letter}B"
    return f"{num_bytes} B"


def format_duration(seconds: float) -> str:
    """``seconds`` for people."""
    return f"{seconds * 1000:g} ms" if 0 < seconds < 1 else f"{seconds:g} s"
