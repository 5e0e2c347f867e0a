"""How many lines one cause may write: the first few of each within a window, and then their number. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

__all__ = ["RateLimit"]


@dataclass(slots=True)
class _Window:
    began_at: float
    num_passed: int = 0
    num_held_back: int = 0


@dataclass(slots=True)
class RateLimit:
    """``num_passing`` of each key pass within ``window_seconds``. Remembers at most ``max_keys``; others share a key.

    Times are seconds of one monotonic clock. Not thread-safe.
    """

    num_passing: int = 5
    window_seconds: float = 10.0
    max_keys: int = 256
    _windows: dict[Hashable, _Window] = field(default_factory=dict)

    def admit(self, key: Hashable, now: float) -> int | None:
        """None: hold this one back. Else it passes, and so many of its key were held back in the window before."""
        if key not in self._windows and len(self._windows) >= self.max_keys:
            self._forget(now)
            if len(self._windows) >= self.max_keys:
                key = None
        window = self._windows.get(key)
        num_before = 0
        if window is None or now - window.began_at >= self.window_seconds:
            num_before = 0 if window is None else window.num_held_back
            window = self._windows[key] = _Window(now)
        if window.num_passed >= self.num_passing:
            window.num_held_back += 1
            return None
        window.num_passed += 1
        return num_before

    def take_held_back(self) -> dict[Hashable, int]:
        """How many of each key were held back and not told yet; they count as told then. None: keys without a place."""
        counts = {key: window.num_held_back for key, window in self._windows.items() if window.num_held_back}
        for key in counts:
            self._windows[key].num_held_back = 0
        return counts

    def _forget(self, now: float) -> None:
        for key in [
            key
            for key, window in self._windows.items()
            if now - window.began_at >= self.window_seconds and not window.num_held_back
        ]:
            del self._windows[key]
