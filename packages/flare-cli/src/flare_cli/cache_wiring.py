"""The prefix cache of one rank, put together: nothing without a directory and a memory tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flare_core.engine.engine import NoGate
from flare_core.ports import JobGate, PrefixStore

from flare_cli.config import RunConfig
from flare_cli.control_group import ControlGroup
from flare_cli.snapshot import CacheSnapshot
from flare_cli.wiring import RankModel

__all__ = ["RankCache", "open_leader_cache", "open_peer_cache"]


@dataclass(slots=True)
class RankCache:
    """What the engine and the rank's life need of a cache."""

    store: PrefixStore | None = None
    gate: JobGate = NoGate()
    facts: tuple[tuple[str, str], ...] = ()
    row_interval_tokens: int = 0

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when the store has events."""

    def snapshot(self) -> CacheSnapshot | None:
        """The record path now."""
        return None

    def close(self) -> None:
        """Flush and close."""


def open_leader_cache(
    config: RunConfig, group: ControlGroup, model: RankModel, *, on_loss: Callable[[str], None]
) -> RankCache:
    """Rank zero's cache."""
    del config, group, model, on_loss
    return RankCache()


def open_peer_cache(
    config: RunConfig, group: ControlGroup, model: RankModel, *, on_loss: Callable[[str], None]
) -> RankCache:
    """A peer's cache."""
    del config, group, model, on_loss
    return RankCache()
