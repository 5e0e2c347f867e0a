"""A peer's half of the sharded transport: jobs from rank zero to its own transport, answers back. Starts no thread
but the one that drains.

Frames are handled on the record link's thread, heartbeats too; nothing there waits for a disk or a device. When the
link ends, for whatever reason, the transport is drained and closed, and the process is told to end. Rank zero's plans
and what other ranks do are not known here.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from flare_cache.dispatcher import LocalTransport, RecordLink
from flare_cache.jobs import JobResult
from flare_cache.loss import loss_of
from flare_cache.record_link import (
    RECORD_ACK,
    RECORD_JOB,
    RECORD_POOL,
    RECORD_STARTED,
    Ack,
    Progress,
    Started,
    decode_job,
    decode_progress,
    encode_ack,
    encode_progress,
    encode_started,
)
from flare_core.errors import Poisoned, PoisonReason
from flare_transport.errors import TransportError
from flare_transport.frame_types import HEARTBEAT
from flare_transport.router import LinkEnd, Router

__all__ = ["DRAIN_SECONDS", "PeerService", "ServiceEnd"]

DRAIN_SECONDS = 0.4
"""A process whose link was lost ends within a second; this much of it may be spent on draining."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceEnd:
    """The service has ended.

    Attributes:
        reason: a sentence for people.
        is_loss: the link broke, or rank zero gave it up; False after an orderly shutdown.
        is_drained: no transfer touches memory or files any more. If not, end by ``os._exit`` without freeing anything.
        loss: what a loss counts as.
    """

    reason: str
    is_loss: bool
    is_drained: bool
    loss: PoisonReason


def _run_in_thread(task: Callable[[], None]) -> None:
    threading.Thread(target=task, name="flare record drain", daemon=True).start()


class PeerService:
    """See the module. Build it, then the transport with ``on_result=service.finished_here`` and
    ``on_fault=service.fault_here``, then :meth:`attach`.

    Args:
        run_id, rank: of this run, as the rendezvous agreed.
        on_end: called once, from a thread of its own, after the link ended and the transport was closed.
        drain_seconds: how long transfers that run may take to end when the link is lost.
        run_apart: has the draining, which blocks that long, run elsewhere.
        on_pool: takes rank zero's word about the pool; must not block, and raises msgspec.DecodeError where it is none.
    """

    def __init__(
        self,
        *,
        run_id: bytes,
        rank: int,
        on_end: Callable[[ServiceEnd], None],
        drain_seconds: float = DRAIN_SECONDS,
        run_apart: Callable[[Callable[[], None]], None] = _run_in_thread,
        on_pool: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._run_id = run_id
        self._rank = rank
        self._on_end = on_end
        self._drain_seconds = drain_seconds
        self._run_apart = run_apart
        self._on_pool = on_pool
        self._link: RecordLink | None = None
        self._transport: LocalTransport | None = None
        self._leader_progress = Progress(0, 0)
        self._last_step = 0
        self._num_finished = 0
        self._finished = itertools.count(1)
        self._ended = threading.Event()
        self._mutex = threading.Lock()
        self._is_serving = False
        self._end_before_serving: LinkEnd | None = None

    def route(self, router: Router) -> None:
        """Declare the record link's routes, before that link is started."""
        router.route(RECORD_JOB, lambda _, payload: self._job_came(payload))
        router.route(RECORD_POOL, lambda _, payload: self._leader_spoke(payload))
        router.route(HEARTBEAT, lambda _, payload: self._heard(payload))
        router.on_end(lambda _, end: self._link_ended(end))

    def attach(self, transport: LocalTransport, link: RecordLink) -> None:
        """The started transport, and the link, before it is started; the service keeps both until the end."""
        self._transport = transport
        self._link = link

    def serve(self) -> None:
        """The ranks have joined: from now on, and if the link has ended already, its end is this rank's end."""
        with self._mutex:
            self._is_serving = True
            end = self._end_before_serving
        if end is not None:
            self._drain_apart(end)

    def pulse(self) -> bytes:
        """Payload of a heartbeat to rank zero."""
        return encode_progress(Progress(self._last_step, self._num_finished))

    def finished_here(self, result: JobResult) -> None:
        """The transport has ended a job: acknowledge it."""
        self._num_finished = next(self._finished)
        link = self._link
        if link is None:
            return
        try:
            link.send(RECORD_ACK, encode_ack(Ack(self._run_id, self._rank, result)))
        except TransportError as error:
            # Nothing is lost by this: rank zero never reports a job that was not acknowledged.
            link.fail(f"job {result.job_id} cannot be acknowledged: {error}")

    def fault_here(self, reason: str) -> None:
        """This rank's device failed under a job, which therefore never ends: give the link up."""
        if self._link is not None:
            self._link.fail(reason)

    def step_finished(self, step: int) -> None:
        """Steps up to ``step`` have finished on this rank's device."""
        self._last_step = step
        if self._transport is not None:
            self._transport.step_finished(step)

    def wait_for_jobs(self, jobs: Sequence[int]) -> None:
        """Block until these jobs have ended on this rank. Raises Poisoned when the link was lost meanwhile."""
        if jobs and self._transport is not None:
            self._transport.wait_for_jobs(jobs)

    @property
    def leader_progress(self) -> Progress:
        """What rank zero's last heartbeat said."""
        return self._leader_progress

    def close(self, timeout_seconds: float = 10.0) -> bool:
        """End in order from this side and wait until the service has ended; whether that came in time."""
        if self._link is not None:
            self._link.shutdown()
        return self.wait_ended(timeout_seconds)

    def wait_ended(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the link has ended, the transport was closed and ``on_end`` has returned."""
        return self._ended.wait(timeout_seconds)

    def _job_came(self, payload: memoryview) -> None:
        link, transport = self._link, self._transport
        if link is None or transport is None:
            return
        try:
            frame = decode_job(payload)
        except msgspec.DecodeError as error:
            link.fail(f"a job that cannot be read: {error}")
            return
        if frame.run_id != self._run_id:
            link.fail(f"a job of another run ({frame.run_id.hex()})")
            return
        job = frame.job
        try:
            # Accepted: the transport checks it against this rank's geometry before it touches anything.
            link.send(RECORD_STARTED, encode_started(Started(self._run_id, self._rank, job.job_id)))
            transport.submit(job)
        except (Poisoned, TransportError, ValueError) as error:
            link.fail(f"job {job.job_id} cannot be taken: {error}")

    def say(self, payload: bytes) -> None:
        """Send rank zero this rank's word about the pool; a link that cannot take it is given up."""
        if self._link is None:
            return
        try:
            self._link.send(RECORD_POOL, payload)
        except TransportError as error:
            self._link.fail(f"a word about the pool cannot be sent: {error}")

    def _leader_spoke(self, payload: memoryview) -> None:
        try:
            if self._on_pool is not None:
                self._on_pool(payload)
        except msgspec.DecodeError as error:
            if self._link is not None:
                self._link.fail(f"a word about the pool that cannot be read: {error}")

    def _heard(self, payload: memoryview) -> None:
        try:
            self._leader_progress = decode_progress(payload)
        except msgspec.DecodeError as error:
            if self._link is not None:
                self._link.fail(f"a heartbeat that cannot be read: {error}")

    def _link_ended(self, end: LinkEnd) -> None:
        with self._mutex:
            if not self._is_serving:
                # The join sees the end itself and fails start-up with a better message.
                self._end_before_serving = end
                return
        self._drain_apart(end)

    def _drain_apart(self, end: LinkEnd) -> None:
        # Draining waits for disk threads, which the link's own thread must not do.
        self._run_apart(lambda: self._end(end))

    def _end(self, end: LinkEnd) -> None:
        is_drained = self._transport is None or self._transport.close(self._drain_seconds)
        if not is_drained:
            _log.error("transfers did not end within %.1f s of the record link", self._drain_seconds)
        try:
            self._on_end(ServiceEnd(end.detail, end.is_loss, is_drained, loss_of(end)))
        finally:
            self._ended.set()
