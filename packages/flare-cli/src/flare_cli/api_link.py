"""The worker's end of the link to the API process: commands in, events and notices out.

Commands that come before the engine is there wait. Knows no engine but its inbox.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from flare_cli.config import RunConfig, decode_config
from flare_cli.snapshot import ClusterSnapshot
from flare_cli.worker_protocol import (
    ABANDON,
    COMMANDS,
    CONFIGURATION,
    EVENTS,
    NOTICE,
    SNAPSHOT_QUERY,
    Notice,
    SnapshotReply,
    Stage,
    encode_notice,
)
from flare_core.engine.inbox import Inbox
from flare_core.engine.request import EngineEvent, decode_commands, encode_events
from flare_core.errors import PoisonReason
from flare_transport import Link, LinkEnd, Router, TransportError

__all__ = ["ApiLink"]


class ApiLink:
    """Receives on the link's thread; sends from any.

    ``on_loss`` is called when the API process is gone, ``on_abandon`` when it gives the start up.
    """

    def __init__(self, link: Link, *, on_loss: Callable[[str], None], on_abandon: Callable[[], None]) -> None:
        self._link = link
        self._on_loss = on_loss
        self._on_abandon = on_abandon
        self._config: queue.SimpleQueue[RunConfig] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._inbox: Inbox | None = None
        self._early: list[bytes] = []
        self._num_queries = 0
        self._wants_records = False

    def start(self) -> None:
        """Start receiving."""
        router = Router()
        router.route(CONFIGURATION, lambda _, payload: self._config.put(decode_config(bytes(payload))))
        router.route(COMMANDS, lambda _, payload: self._take_commands(bytes(payload)))
        router.route(SNAPSHOT_QUERY, lambda _, payload: self._take_query(with_records=bool(payload)))
        router.route(ABANDON, lambda _, __: self._on_abandon())
        router.on_end(self._take_end)
        self._link.start(router, pulse=lambda: b"")

    def receive_config(self) -> RunConfig:
        """The configuration; blocks until it has come."""
        return self._config.get()

    def attach(self, inbox: Inbox) -> None:
        """Deliver commands to ``inbox`` from now on, those that waited first."""
        with self._lock:
            self._inbox = inbox
            for data in self._early:
                inbox.put(decode_commands(data))
            self._early.clear()

    def emit(self, events: list[EngineEvent]) -> None:
        """Send engine events; never blocks.

        Raises:
            TransportError: the API process is gone, or reads nothing any more.
        """
        self._link.send(EVENTS, encode_events(events))

    def notify(self, notice: Notice) -> None:
        """Send a notice; nobody hears it when the API process is gone. Never blocks."""
        try:
            self._link.send(NOTICE, encode_notice(notice))
        except TransportError:
            return

    def stage(self, text: str, num_done: int = 0, total: int = 0) -> None:
        """Report a stage of the start."""
        self.notify(Stage(text, num_done, total))

    def answer_queries(self, snapshot: Callable[[bool], ClusterSnapshot]) -> None:
        """Answer what was asked since the last call; called by the engine thread between steps.

        ``snapshot`` is told whether every record's state in the pool was asked for.
        """
        if self._num_queries:
            self._num_queries, with_records, self._wants_records = 0, self._wants_records, False
            self.notify(SnapshotReply(snapshot(with_records), with_records))

    def close(self) -> None:
        """Part in order: what was sent arrives, then the API process sees the end. Blocks up to 5 s."""
        self._link.shutdown()
        self._link.wait_ended(5.0)

    def _take_commands(self, data: bytes) -> None:
        with self._lock:
            if self._inbox is None:
                self._early.append(data)
            else:
                self._inbox.put(decode_commands(data))

    def _take_query(self, *, with_records: bool) -> None:
        self._wants_records = self._wants_records or with_records
        self._num_queries += 1
        with self._lock:
            if self._inbox is not None:
                self._inbox.wake()

    def _take_end(self, link: Link, end: LinkEnd) -> None:
        del link
        if end.is_loss:
            self._on_loss(f"{PoisonReason.PARENT_LOST}: the API process is gone")
