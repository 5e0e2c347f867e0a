"""When a heartbeat is due and when silence is death. Pure: time is an argument; knows no link and no thread."""

from dataclasses import dataclass

__all__ = ["HeartbeatSettings", "Liveness"]


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """A heartbeat is sent every `interval_seconds`; none received for `deadline_seconds` is the other side's death."""

    interval_seconds: float = 1.0
    deadline_seconds: float = 5.0


class Liveness:
    """One side's view of a link's heartbeats, from `now` on. Times are seconds of one monotonic clock."""

    def __init__(self, settings: HeartbeatSettings, now: float) -> None:
        self.deadline_seconds = settings.deadline_seconds
        self._interval_seconds = settings.interval_seconds
        self._due_at = now
        self._heard_at = now

    def is_due(self, now: float) -> bool:
        """Whether a heartbeat should be sent now."""
        return now >= self._due_at

    def sent(self, now: float) -> None:
        """A heartbeat was sent, or withheld on purpose; the next is due an interval later."""
        self._due_at = now + self._interval_seconds

    def heard(self, now: float) -> None:
        """A heartbeat arrived."""
        self._heard_at = now

    def expect_within(self, deadline_seconds: float, now: float) -> None:
        """From now on silence for so long is death. May be called from any thread."""
        self._heard_at = now
        self.deadline_seconds = deadline_seconds

    def is_dead(self, now: float) -> bool:
        """Whether the other side has been silent for the whole deadline."""
        return now >= self._heard_at + self.deadline_seconds

    def next_timer(self) -> float:
        """The time at which something is next to be done, unless something arrives before it."""
        return min(self._due_at, self._heard_at + self.deadline_seconds)
