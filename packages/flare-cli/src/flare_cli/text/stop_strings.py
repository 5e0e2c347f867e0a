"""Stop strings over a text that arrives in pieces: no character of a match, or behind it, is ever let out.

Pure. Text that may be the beginning of a stop string is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """State of one output."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The text that may be sent now. After a match nothing more comes out."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            # The first to begin wins; of two that begin together the shorter, which is complete first.
            at, self.matched = min(found, key=lambda pair: (pair[0], len(pair[1])))
            out, self._held = self._held[:at], ""
            return out
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def skip(self, text: str) -> str:
        """``text`` must not be searched (minimum length not reached): it is let out with what was held."""
        out, self._held = self._held + text, ""
        return out

    def flush(self) -> str:
        """What was held back, when the output ends otherwise."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
