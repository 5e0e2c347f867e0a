"""The join of one simulated rank: the real machines, driven by frames as they come instead of by a waiting thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from flare_cache.join import Finished, JoinEffect, JoinLeader, JoinPeer
from flare_cache.join_directory import make_statement
from flare_cache.join_messages import Broken, JoinMessage, Refused, decode_message, encode_message
from flare_cache.join_shell import JOIN_TIMEOUT_SECONDS, JoinRun
from flare_cache.record_group import RankSetup
from flare_cache.record_link import RECORD_JOIN
from flare_cache.record_plan import FileSizes
from flare_cache.record_table import RecordTable
from flare_core.errors import ConfigurationMismatch, FlareError
from flare_qualify.sim.links import SimLink
from flare_transport.errors import TransportError
from flare_transport.router import Router

__all__ = ["Joining"]

_Receive = Callable[[int, JoinMessage], list[JoinEffect]]
_Lose = Callable[[int, str], list[JoinEffect]]


class Joining:
    """One rank's join.

    Args:
        setup: the rank's.
        links: record links by rank; rank 0 alone for a peer.
        now: virtual seconds.
        on_joined: called once with what was agreed.
        on_failed: called once with why the rank cannot start.
    """

    def __init__(
        self,
        setup: RankSetup,
        links: Mapping[int, SimLink],
        *,
        now: float,
        on_joined: Callable[[Finished], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._setup = setup
        self._links = links
        self._deadline = now + JOIN_TIMEOUT_SECONDS
        self._on_joined = on_joined
        self._on_failed = on_failed
        self._early: list[tuple[int, JoinMessage | str]] = []
        self._receive: _Receive | None = None
        self._lose: _Lose | None = None
        self._run: JoinRun | None = None
        self._is_over = False

    def route(self, router: Router, rank: int) -> None:
        """Declare the join's route on the link to ``rank``."""
        router.route(RECORD_JOIN, lambda _, payload: self._came(rank, payload))
        router.on_end(lambda _, end: self._take(rank, end.detail))

    def begin_as_leader(self, *, draw_set_id: Callable[[], bytes]) -> None:
        """Scan, and wait for every rank."""
        setup = self._setup
        settings = setup.settings

        def begin() -> list[JoinEffect]:
            scan = setup.scan()
            leader = JoinLeader(
                make_statement(settings, setup.geometry, setup.directory, scan),
                scan.records if scan is not None else RecordTable.of(()),
                world_size=settings.identity.world_size,
                sizes=FileSizes(settings.identity.geometries),
                accept_loss=settings.accept_loss,
                draw_set_id=draw_set_id,
            )
            self._receive, self._lose = leader.receive, leader.lost
            self._run = JoinRun(
                self._links, lambda effect: setup.apply(scan, effect), leader.applied, leader.failed, self._deadline
            )
            return leader.start()

        self._begin(begin, is_leader=True)

    def begin_as_peer(self) -> None:
        """Scan, and state it."""
        setup = self._setup

        def begin() -> list[JoinEffect]:
            scan = setup.scan()
            peer = JoinPeer(
                make_statement(setup.settings, setup.geometry, setup.directory, scan),
                scan.records if scan is not None else RecordTable.of(()),
            )
            self._receive = lambda _, message: peer.receive(message)
            self._lose = lambda _, reason: peer.lost(reason)
            self._run = JoinRun(
                self._links, lambda effect: setup.apply(scan, effect), peer.applied, peer.failed, self._deadline
            )
            return peer.start()

        self._begin(begin, is_leader=False)

    def _begin(self, begin: Callable[[], list[JoinEffect]], *, is_leader: bool) -> None:
        try:
            effects = begin()
        except (FlareError, OSError) as error:
            lines = [str(error) or type(error).__name__]
            self._abandon(Refused(lines, isinstance(error, ConfigurationMismatch)) if is_leader else Broken(lines[0]))
            self._fail(str(error))
            return
        self._perform(effects)
        for rank, what in self._early:
            self._take(rank, what)

    def _came(self, rank: int, payload: memoryview) -> None:
        if self._is_over:
            return
        try:
            self._take(rank, decode_message(payload))
        except msgspec.DecodeError as error:
            self._take(rank, f"a message that cannot be read: {error}")

    def _take(self, rank: int, what: JoinMessage | str) -> None:
        if self._is_over:
            return
        if self._receive is None or self._lose is None:
            self._early.append((rank, what))
        else:
            self._perform(self._lose(rank, what) if isinstance(what, str) else self._receive(rank, what))

    def _perform(self, effects: list[JoinEffect]) -> None:
        if self._run is None or self._is_over:
            return
        try:
            finished = self._run.perform(effects)
        except FlareError as error:
            self._fail(str(error))
            return
        if finished is not None:
            self._is_over = True
            self._on_joined(finished)

    def _fail(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_failed(reason)

    def _abandon(self, last_word: JoinMessage) -> None:
        for link in self._links.values():
            try:
                link.send(RECORD_JOIN, encode_message(last_word))
            except TransportError:
                continue
