"""The engine as the API process sees it: commands to the worker over the local link, its events back to the outputs.

Lives on the event loop's thread; the link's thread only hands over what it received. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from flare_cli.server.engine_port import (
    EngineRequest,
    EngineState,
    Finished,
    Lost,
    OutputEvent,
    OutputQueue,
    PromptScored,
    Tokens,
)
from flare_cli.server.errors import EngineUnavailable
from flare_cli.snapshot import ClusterSnapshot
from flare_cli.worker_protocol import (
    ABANDON,
    COMMANDS,
    EVENTS,
    NOTICE,
    SERVING_DEADLINE_SECONDS,
    SNAPSHOT_QUERY,
    Notice,
    Ready,
    SnapshotReply,
    WorkerLost,
    decode_notice,
)
from flare_core.engine import request as wire
from flare_core.errors import PoisonReason, RequestError, poison_reason
from flare_core.keys import tenant_salt
from flare_core.prefix import Tier
from flare_transport import EndCause, Link, LinkEnd, LinkLost, LocalProtocolError, QueueFull, Router

__all__ = ["EngineClient"]

SNAPSHOT_SECONDS = 1.0
RECORDS_SECONDS = 10.0
RESET_SECONDS = 30.0
STARTING = ClusterSnapshot(state="starting")


@dataclass(slots=True)
class _Pending:
    """Where an output's events go."""

    queue: OutputQueue
    tag: int


@dataclass(slots=True)
class EngineClient:
    """Implements ``server.engine_port.Engine``.

    ``on_notice`` hears every notice of the worker, and ``on_end`` once how the link ended; both on the loop's thread.
    """

    loop: asyncio.AbstractEventLoop
    link: Link
    salt_key: bytes
    model_name: str
    on_notice: Callable[[Notice], None]
    on_end: Callable[[LinkEnd], None]
    state: EngineState = EngineState.STARTING
    detail: str = "starting"
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _last_snapshot: ClusterSnapshot = STARTING
    _snapshot_waiters: list[asyncio.Future[ClusterSnapshot]] = field(default_factory=list)
    _record_waiters: list[asyncio.Future[ClusterSnapshot]] = field(default_factory=list)
    _resets: dict[str, asyncio.Future[str | None]] = field(default_factory=dict)
    _lost_detail: str | None = None
    _poisoned: dict[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, PoisonReason), 0))

    def start(self) -> None:
        """Start receiving; call once, on the loop's thread."""
        router = Router()
        router.route(EVENTS, lambda _, payload: self._hand_over(self._take_events, bytes(payload)))
        router.route(NOTICE, lambda _, payload: self._hand_over(self._take_notice, bytes(payload)))
        router.on_end(lambda _, end: self._hand_over(self._take_end, end))
        self.link.start(router, pulse=lambda: b"")

    def submit(self, request: EngineRequest, queue: OutputQueue, tag: int) -> str:
        """See ``Engine.submit``."""
        if self.state is not EngineState.READY:
            msg = f"the server is {self.state}: {self.detail}"
            raise EngineUnavailable(msg)
        request_id = format(next(self._ids), "x")
        added = wire.AddRequest(
            wire.EngineRequest(
                request_id=request_id,
                token_ids=struct.pack(f"<{len(request.token_ids)}I", *request.token_ids),
                params=request.params,
                salt=tenant_salt(self.salt_key, request.tenant, request.cache_salt),
                arrival=time.monotonic(),
            )
        )
        self._send(added)
        self._pending[request_id] = _Pending(queue, tag)
        return request_id

    def end(self, request_id: str) -> None:
        """See ``Engine.end``."""
        if request_id in self._pending:
            with contextlib.suppress(EngineUnavailable):  # then ``Lost`` comes
                self._send(wire.CancelRequest(request_id))

    def cancel(self, request_id: str) -> None:
        """See ``Engine.cancel``."""
        if self._pending.pop(request_id, None) is not None:
            with contextlib.suppress(EngineUnavailable):  # then it is cancelled already
                self._send(wire.CancelRequest(request_id))

    def drain(self) -> None:
        """Take no request any more; the worker ends when it has finished those it has."""
        self.state, self.detail = EngineState.DRAINING, "shutting down; requests in work are being finished"
        self._send(wire.Drain())

    def stop(self) -> None:
        """Have the worker end at once."""
        self._send(wire.Stop())

    def abandon(self) -> None:
        """Give the start up: the worker ends at once, and every rank that has come with it."""
        with contextlib.suppress(LinkLost, QueueFull):  # then it is ending already
            self.link.send(ABANDON)

    @property
    def num_pending(self) -> int:
        """Outputs that have not ended."""
        return len(self._pending)

    async def snapshot(self, *, with_records: bool = False) -> ClusterSnapshot:
        """See ``Engine.snapshot``."""
        if self.state not in {EngineState.READY, EngineState.DRAINING}:
            return self._stamped(self._last_snapshot)
        waiter: asyncio.Future[ClusterSnapshot] = self.loop.create_future()
        waiters = self._record_waiters if with_records else self._snapshot_waiters
        waiters.append(waiter)
        try:
            if len(waiters) == 1:
                self.link.send(SNAPSHOT_QUERY, b"\1" if with_records else b"")
            async with asyncio.timeout(RECORDS_SECONDS if with_records else SNAPSHOT_SECONDS):
                return self._stamped(await waiter)
        except (TimeoutError, LinkLost, QueueFull):
            waiters.clear()
            return self._stamped(self._last_snapshot)

    async def reset(self, tier: Tier) -> None:
        """See ``Engine.reset``."""
        if self.state is not EngineState.READY:
            msg = f"the server is {self.state}: {self.detail}"
            raise EngineUnavailable(msg)
        reset_id = format(next(self._ids), "x")
        self._resets[reset_id] = self.loop.create_future()
        try:
            self._send(wire.ResetCache(reset_id, tier))
            async with asyncio.timeout(RESET_SECONDS):
                failure = await self._resets[reset_id]
        except TimeoutError:
            msg = f"the engine did not reset {tier} within {RESET_SECONDS:g} s"
            raise EngineUnavailable(msg) from None
        finally:
            del self._resets[reset_id]
        if failure is not None:
            raise RequestError(failure, status=409, code="reset_failed")

    def _send(self, command: wire.Command) -> None:
        try:
            self.link.send(COMMANDS, wire.encode_commands([command]))
        except (LinkLost, QueueFull, LocalProtocolError) as error:
            raise EngineUnavailable(str(error)) from None

    def _stamped(self, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """The worker does not know the model's name, nor that it is draining or lost; this process does."""
        return msgspec.structs.replace(
            snapshot, state=str(self.state), detail=self.detail, model=self.model_name, poisoned=dict(self._poisoned)
        )

    def _hand_over(self, take: Callable[..., None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits for anything any more
            self.loop.call_soon_threadsafe(take, value)

    def _take_events(self, data: bytes) -> None:
        for event in wire.decode_events(data):
            match event:
                case wire.Tokens(request_id, token_ids, logprobs):
                    self._put(request_id, Tokens(token_ids, logprobs or ()))
                case wire.PromptLogprobs(request_id, entries):
                    self._put(request_id, PromptScored(entries))
                case wire.Progress():
                    pass  # the stream's own keep-alive is enough
                case wire.Finished(request_id, wire.FinishReason.ERROR, _):
                    self._put(request_id, Lost("the engine gave the request up", 500), last=True)
                case wire.Finished(request_id, reason, usage):
                    drafts = usage.draft_tokens, usage.accepted_tokens
                    self._put(request_id, Finished(str(reason), usage.cached_tokens, *drafts), last=True)
                case wire.Failed(request_id, message, status):
                    self._put(request_id, Lost(message, status), last=True)
                case wire.CacheReset(reset_id, _, failure):
                    waiter = self._resets.get(reset_id)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(failure)

    def _put(self, request_id: str, event: OutputEvent, *, last: bool = False) -> None:
        pending = self._pending.pop(request_id, None) if last else self._pending.get(request_id)
        if pending is not None:
            pending.queue.put_nowait((pending.tag, event))

    def _take_notice(self, data: bytes) -> None:
        notice = decode_notice(data)
        match notice:
            case Ready() if self.state is EngineState.STARTING:
                self.state, self.detail = EngineState.READY, "serving"
                self.link.expect_heartbeats_within(SERVING_DEADLINE_SECONDS)
            case WorkerLost(message):
                self._lost_detail = message
                self._lose(message)
            case SnapshotReply(snapshot, with_records):
                self._last_snapshot = snapshot
                waiters, self._snapshot_waiters = self._snapshot_waiters, []
                if with_records:
                    waiters += self._record_waiters
                    self._record_waiters = []
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(snapshot)
        self.on_notice(notice)

    def _take_end(self, end: LinkEnd) -> None:
        # After a drain the worker parts in order; whatever was still pending then has been told before.
        if end.is_loss or (end.cause is EndCause.CLOSED_BY_PEER and self.state is not EngineState.DRAINING):
            why = PoisonReason.SILENT if end.cause is EndCause.SILENT else PoisonReason.WORKER_DIED
            self._lose(self._lost_detail or f"{why}: the engine's process is gone")
        self.on_end(end)

    def _lose(self, message: str) -> None:
        if self.state in {EngineState.READY, EngineState.DRAINING}:
            self._poisoned[poison_reason(message) or PoisonReason.INTERNAL] += 1
        self.state, self.detail = EngineState.LOST, message
        pending, self._pending = self._pending, {}
        for output in pending.values():
            output.queue.put_nowait((output.tag, Lost(message)))
        for waiter in self._resets.values():
            if not waiter.done():
                waiter.set_exception(EngineUnavailable(message))
