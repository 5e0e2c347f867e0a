"""Logs whom rank zero saw at the rendezvous; of an address that comes again and again, soon only the number."""

from __future__ import annotations

import logging
import threading
import time

from flare_cli.control_group import describe_sighting
from flare_cli.rate_limit import RateLimit
from flare_transport import Sighting

__all__ = ["SightingLog"]

_LOG = logging.getLogger("flare")


class SightingLog:
    """Called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit = RateLimit()

    def note(self, sighting: Sighting) -> None:
        """Log it, or count it; those that were only counted are told when a rank has joined."""
        with self._lock:
            if sighting.has_joined:
                for source, count in self._limit.take_held_back().items():
                    _LOG.info(
                        "rendezvous: %s: %d more connections were turned away",
                        "others" if source is None else source,
                        count,
                    )
                held_back: int | None = 0
            else:
                held_back = self._limit.admit(sighting.source, time.monotonic())
        if held_back is not None:
            more = f" (and {held_back} more of its connections before)" if held_back else ""
            _LOG.info("rendezvous: %s%s", describe_sighting(sighting), more)
