"""Rank zero's shell around the leader's machine: its own transport, the record links, the clock, and the engine.

Events run the machine in the thread that brings them (see :mod:`flare_cache.turnstile`): a submission in the engine's,
an acknowledgement in its link's, a local result in a disk thread, deadlines in this module's one thread. None of it
blocks on a disk, a device or a peer. Outcomes wait for the engine, which is woken.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from flare_cache.jobs import Job, JobOp, JobResult
from flare_cache.loss import loss_of
from flare_cache.outcomes import Effect, Outcome, Poison, Report, RunHere, Send
from flare_cache.record_link import (
    RECORD_ACK,
    RECORD_JOB,
    RECORD_POOL,
    RECORD_STARTED,
    Progress,
    decode_ack,
    decode_progress,
    decode_started,
    encode_progress,
)
from flare_cache.sharded import ShardedLeader
from flare_cache.turnstile import Turnstile
from flare_core.errors import Poisoned, PoisonReason
from flare_transport.errors import QueueFull, TransportError
from flare_transport.failpoint import failpoint
from flare_transport.frame_types import HEARTBEAT
from flare_transport.framing import Buffer, FrameType
from flare_transport.router import LinkEnd, Router

__all__ = ["Dispatcher", "LocalTransport", "RecordLink"]

_TICK_SECONDS = 0.25
_MAX_LATE_TICKS = 8
"""After so many ticks that nobody handled, two seconds, this rank is silent to its peers; they end it within five."""
_MAX_LOST_TICKS = 40
"""After so many, ten seconds, this rank ends itself."""
_REPORT_POINTS = {
    JobOp.STORE: "store.report",
    JobOp.FETCH: "fetch.report",
    JobOp.TRUNCATE: "truncate.report",
    JobOp.UNLINK: "unlink.report",
    JobOp.PUT: "put.report",
}
_log = logging.getLogger(__name__)

_Step = Callable[[float], list[Effect]]


class RecordLink(Protocol):
    """A started record link; :class:`flare_transport.link.Link` is one. Nothing here blocks."""

    def send(self, frame_type: FrameType, payload: Buffer = b"") -> None:
        """Queue a frame. Raises TransportError, having sent nothing, when the queue is full or the link ended."""
        ...

    def shutdown(self) -> None:
        """End in order."""
        ...

    def fail(self, reason: str) -> None:
        """Give the link up; the other side sees a disconnect."""
        ...


class LocalTransport(Protocol):
    """A rank's own executor of jobs; :class:`flare_cache.staged.StagedTransport` is one."""

    def submit(self, job: Job) -> None:
        """Take a job without blocking; its result comes through the callback it was built with."""
        ...

    def step_finished(self, step: int) -> None:
        """Jobs that wait for steps up to ``step`` may start."""
        ...

    def wait_for_jobs(self, jobs: Sequence[int]) -> None:
        """Block until these jobs have ended on this rank. Raises Poisoned when it was closed meanwhile."""
        ...

    def close(self, deadline_seconds: float) -> bool:
        """Drain; whether everything ended in time."""
        ...


class Dispatcher:
    """See the module. Build it, then the local transport with ``on_result=dispatcher.finished_here`` and
    ``on_fault=dispatcher.fault_here``, then start it.

    Args:
        leader: the machine.
        on_outcome: called whenever :meth:`take` has something new, from any thread; must not block.
        on_poison: called once with the reason, from any thread; must not block. The process is to end within a second.
        on_pool: takes a peer's word about the pool; must not block, and raises msgspec.DecodeError where it is none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        leader: ShardedLeader,
        *,
        on_outcome: Callable[[], None],
        on_poison: Callable[[str], None],
        on_pool: Callable[[int, memoryview], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leader = leader
        self._on_outcome = on_outcome
        self._on_poison = on_poison
        self._on_pool = on_pool
        self._clock = clock
        self._turnstile: Turnstile[_Step] = Turnstile(self._handle)
        self._outcomes: deque[Outcome] = deque()
        self._poisoned: str | None = None
        self._closing = threading.Event()
        self._is_serving = False
        self._lost_early: list[tuple[int, str, PoisonReason]] = []
        self._thread = threading.Thread(target=self._run_clock, name="flare record dispatcher", daemon=True)
        self._transport: LocalTransport | None = None
        self._links: Mapping[int, RecordLink] = {}
        self._last_step = 0
        self._num_finished = 0
        self._finished = itertools.count(1)
        self._progress: dict[int, Progress] = {}
        self._num_late_ticks = 0

    def route(self, router: Router, rank: int) -> None:
        """Declare the routes of the record link of ``rank``, before that link is started."""
        router.route(RECORD_STARTED, lambda _, payload: self._started(rank, payload))
        router.route(RECORD_ACK, lambda _, payload: self._acked(rank, payload))
        router.route(RECORD_POOL, lambda _, payload: self._spoke(rank, payload))
        router.route(HEARTBEAT, lambda _, payload: self._heard(rank, payload))
        router.on_end(lambda _, end: self._link_ended(rank, end))

    def start(self, transport: LocalTransport, links: Mapping[int, RecordLink]) -> None:
        """Serve, once ranks have joined, with a clock of its own. ``transport`` and ``links`` (by rank) are started."""
        self.serve(transport, links)
        self._thread.start()

    def serve(self, transport: LocalTransport, links: Mapping[int, RecordLink]) -> None:
        """Serve without a clock: the caller calls :meth:`tick` several times a second."""
        self._transport = transport
        self._links = links
        self._turnstile.post(self._serve)

    def tick(self) -> None:
        """Time has passed: find who is overdue."""
        self._num_late_ticks += 1
        self._turnstile.post(self._tick)

    def _tick(self, now: float) -> list[Effect]:
        self._num_late_ticks = 0
        return self._leader.tick(now)

    def pulse(self) -> bytes | None:
        """Payload of a heartbeat to a peer; None, no heartbeat, while events are not handled."""
        if self._num_late_ticks > _MAX_LATE_TICKS:
            return None
        return encode_progress(Progress(self._last_step, self._num_finished))

    def submit(self, job: Job, *, tag: int, num_bytes: int, expires_at: float | None = None) -> None:
        """Have ``job`` (id 0) run on every rank; its outcome comes through :meth:`take`. Times are monotonic."""
        self._turnstile.post(
            lambda now: self._leader.submit(job, tag=tag, num_bytes=num_bytes, now=now, expires_at=expires_at)
        )

    def cancel(self, tag: int) -> None:
        """Withdraw what carries ``tag`` and has not begun."""
        self._turnstile.post(lambda now: self._leader.cancel(tag, now))

    def tell(self, rank: int, payload: bytes) -> None:
        """Send a peer what it must know about the pool; a link that cannot take it is lost."""
        link = self._links.get(rank)
        if link is not None:
            self._send(rank, link, RECORD_POOL, payload)

    def take(self) -> list[Outcome]:
        """Outcomes since the last call.

        Raises:
            Poisoned: ranks can no longer account for each other.
        """
        outcomes: list[Outcome] = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        if self._poisoned is not None:
            raise Poisoned(self._poisoned)
        return outcomes

    def finished_here(self, result: JobResult) -> None:
        """Rank zero's own transport finished a job."""
        self._num_finished = next(self._finished)
        self._turnstile.post(lambda now: self._leader.finished_here(result, now))

    def fault_here(self, reason: str) -> None:
        """Rank zero's device failed under a job, which therefore never ends."""
        self._turnstile.post(lambda now: self._leader.fault(reason, now))

    def step_finished(self, step: int) -> None:
        """Steps up to ``step`` have finished on rank zero's device."""
        self._last_step = step
        if self._transport is not None:
            self._transport.step_finished(step)
        self._turnstile.post(lambda now: self._leader.progressed(0, step, now))

    def wait_for_jobs(self, jobs: Sequence[int]) -> None:
        """Block until these jobs have ended on rank zero."""
        if jobs and self._transport is not None:
            self._transport.wait_for_jobs(jobs)

    @property
    def peer_progress(self) -> Mapping[int, Progress]:
        """What each peer's last heartbeat said."""
        return dict(self._progress)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait at rank zero."""
        return self._leader.num_waiting

    @property
    def num_outstanding(self) -> int:
        """Jobs that ranks work on."""
        return self._leader.num_outstanding

    def close(self, deadline_seconds: float) -> bool:
        """End in order: no more jobs, links shut, the local transport drained within the deadline.

        Returns whether it drained. If not, keep page memory as it is until the process ends.
        """
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for link in self._links.values():
            link.shutdown()
        return self._transport is None or self._transport.close(deadline_seconds)

    def _run_clock(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            self.tick()
            if self._num_late_ticks > _MAX_LOST_TICKS:
                seconds = _MAX_LOST_TICKS * _TICK_SECONDS
                self._become_poisoned(f"{PoisonReason.INTERNAL}: the dispatcher has been stuck for {seconds:g} s")

    def _started(self, rank: int, payload: memoryview) -> None:
        try:
            frame = decode_started(payload)
        except msgspec.DecodeError as error:
            self._lost(rank, f"a STARTED frame that cannot be read: {error}")
            return
        self._turnstile.post(lambda now: self._leader.started(rank, frame, now))

    def _acked(self, rank: int, payload: memoryview) -> None:
        try:
            frame = decode_ack(payload)
        except msgspec.DecodeError as error:
            self._lost(rank, f"an acknowledgement that cannot be read: {error}")
            return
        self._turnstile.post(lambda now: self._leader.acked(rank, frame, now))

    def _spoke(self, rank: int, payload: memoryview) -> None:
        try:
            if self._on_pool is not None:
                self._on_pool(rank, payload)
        except msgspec.DecodeError as error:
            self._lost(rank, f"a word about the pool that cannot be read: {error}")

    def _heard(self, rank: int, payload: memoryview) -> None:
        try:
            progress = decode_progress(payload)
        except msgspec.DecodeError as error:
            self._lost(rank, f"a heartbeat that cannot be read: {error}")
            return
        self._progress[rank] = progress
        self._turnstile.post(lambda now: self._leader.progressed(rank, progress.last_step, now))

    def _link_ended(self, rank: int, end: LinkEnd) -> None:
        if not self._closing.is_set():
            self._lost(rank, end.detail, loss_of(end))

    def _lost(self, rank: int, reason: str, why: PoisonReason = PoisonReason.PROTOCOL) -> None:
        self._turnstile.post(lambda now: self._lose(rank, reason, now, why=why))

    def _lose(self, rank: int, reason: str, now: float, *, why: PoisonReason) -> list[Effect]:
        if self._is_serving:
            return self._leader.link_lost(rank, reason, now, why=why)
        # While ranks join, the join itself sees the end and fails start-up with a better message.
        self._lost_early.append((rank, reason, why))
        return []

    def _serve(self, now: float) -> list[Effect]:
        self._is_serving = True
        effects: list[Effect] = []
        for rank, reason, why in self._lost_early:
            effects += self._leader.link_lost(rank, reason, now, why=why)
        return effects

    def _handle(self, step: _Step) -> None:
        try:
            num_undos = self._leader.num_undos
            effects = step(self._clock())
            if self._leader.num_undos > num_undos:
                failpoint("undo.begin")
            for effect in effects:
                self._perform(effect)
        except Exception as error:  # noqa: BLE001 - the boundary of every thread that brings events
            _log.exception("the record dispatcher failed")
            self._become_poisoned(f"{PoisonReason.INTERNAL}: {type(error).__name__}: {error}")

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(rank, payload):
                self._send(rank, self._links[rank], RECORD_JOB, payload)
            case RunHere(job):
                self._run_here(job)
            case Report(outcome):
                failpoint(_REPORT_POINTS[outcome.job.op])
                self._outcomes.append(outcome)
                self._on_outcome()
            case Poison(reason):
                self._become_poisoned(reason)

    def _send(self, rank: int, link: RecordLink, frame_type: FrameType, payload: bytes) -> None:
        try:
            link.send(frame_type, payload)
        except TransportError as error:
            why = PoisonReason.QUEUE_FULL if isinstance(error, QueueFull) else PoisonReason.LINK_LOST
            self._lost(rank, str(error), why)

    def _run_here(self, job: Job) -> None:
        transport = self._transport
        reason = "a job came before the dispatcher was started"
        if transport is not None:
            try:
                transport.submit(job)
            except (Poisoned, ValueError) as error:
                reason = str(error)
            else:
                return
        self._turnstile.post(lambda now: self._leader.fault(reason, now, why=PoisonReason.INTERNAL))

    def _become_poisoned(self, reason: str) -> None:
        if self._poisoned is not None:
            return
        self._poisoned = reason
        _log.error("poisoned: %s", reason)
        self._on_poison(reason)
        self._on_outcome()
        for link in self._links.values():
            link.fail(f"poisoned: {reason}")
