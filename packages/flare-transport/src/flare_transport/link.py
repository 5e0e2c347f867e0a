"""A framed connection in use: one I/O thread, a bounded send queue, heartbeats, and exactly one end.

Owns its socket and its thread. Knows no frame type but HEARTBEAT and BYE; everything else goes to the router's
receivers. The thread runs no consumer code but receivers, end listeners and the heartbeat callback, and never torch.

`send` writes to the socket itself when nothing is queued, which saves a thread switch per frame; whatever the kernel
does not take at once is left to the I/O thread. One lock serialises the socket's calls, none of which blocks.
"""

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from flare_transport.channel import Channel, open_channel
from flare_transport.errors import LinkLost, LocalProtocolError, QueueFull, RemoteProtocolError
from flare_transport.frame_types import BYE, HEARTBEAT
from flare_transport.framing import Buffer, Frame, FrameDecoder, FrameType, encode_header
from flare_transport.liveness import HeartbeatSettings, Liveness
from flare_transport.router import EndCause, LinkEnd, Router
from flare_transport.send_queue import SendQueue

__all__ = ["Link", "LinkSettings", "LinkState", "Pulse"]

_LOG = logging.getLogger(__name__)
_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 18
_READS_PER_TURN = 16
_HANG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL
_READABLE = select.POLLIN | _HANG_UP


class LinkState(Enum):
    """NEW -> OPEN -> DRAINING -> ENDED; a link may end from any state, and never leaves ENDED."""

    NEW = "new"
    OPEN = "open"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Bounds of one link. `drain_seconds` is how long `shutdown` waits for the other side."""

    max_queue_frames: int = 4096
    max_queue_bytes: int = 64 << 20
    drain_seconds: float = 5.0
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)


Pulse = Callable[[], bytes | None]


class Link:
    """A framed link over a connected socket, which it owns. Every method may be called from any thread.

    After `start(router)` frames arrive at the router's receivers. The end of the link is reported once to the router's
    end listeners: after `shutdown`, `close`, `fail`, the other side's BYE, or a fault.
    """

    def __init__(self, sock: socket.socket, *, name: str, settings: LinkSettings | None = None) -> None:
        self._name = name
        self._socket = sock
        self._settings = settings or LinkSettings()
        self._queue = SendQueue(self._settings.max_queue_frames, self._settings.max_queue_bytes)
        self._lock = threading.Lock()
        self._state = LinkState.NEW
        # What the I/O thread is to act on; set under the lock, first one stays.
        self._verdict: LinkEnd | None = None
        self._end: LinkEnd | None = None
        self._thread: threading.Thread | None = None
        self._channel: Channel | None = None
        self._wake_descriptor = -1
        self._is_shut_here = False
        self._liveness = Liveness(self._settings.heartbeat, 0.0)

    @property
    def name(self) -> str:
        """What messages call this link."""
        return self._name

    @property
    def state(self) -> LinkState:
        """Where the link stands now."""
        return self._state

    @property
    def end(self) -> LinkEnd | None:
        """How the link ended, or None while it has not."""
        return self._end

    def start(self, router: Router, *, pulse: Pulse | None = None) -> None:
        """Start the I/O thread.

        With `pulse`, heartbeats are sent at the interval, each with the bytes that `pulse()` returns, or withheld when
        it returns None, and the link ends as SILENT if none arrives for the deadline. Both sides must give one, or
        neither. To see the other side's payloads, route `HEARTBEAT`. Raises `LocalProtocolError` if started before.
        """
        with self._lock:
            if self._state is not LinkState.NEW:
                raise LocalProtocolError(f"{self._name} cannot start: it is {self._state.value}")
            self._channel = open_channel(self._socket)
            self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._state = LinkState.OPEN
        self._liveness = Liveness(self._settings.heartbeat, time.monotonic())
        loop = _Loop(self, self._channel, self._wake_descriptor, router, pulse)
        self._thread = threading.Thread(target=loop.run, name=f"flare {self._name}", daemon=True)
        self._thread.start()

    def expect_heartbeats_within(self, deadline_seconds: float) -> None:
        """From now on, and counted from now, silence for so long ends the link; for a start that others may delay."""
        self._liveness.expect_within(deadline_seconds, time.monotonic())
        self._wake()

    def send(self, frame_type: FrameType, payload: Buffer = b"") -> None:
        """Send or queue one frame; never blocks. `payload` must not change afterwards.

        Raises, having sent nothing: `LocalProtocolError` (over the type's limit, or the link was not started),
        `QueueFull` (the other side does not read), `LinkLost` (the link has ended or is being shut down).
        """
        header = encode_header(frame_type, len(payload))
        with self._lock:
            if self._state is not LinkState.OPEN or self._verdict is not None:
                self._raise_not_open()
            was_empty = not self._queue
            self._queue.push(header, payload)
            # Larger frames are left to the I/O thread, which lets go of the lock between pieces.
            if was_empty and len(payload) <= _WRITE_BYTES and self._flush(2):
                return
        self._wake()

    def shutdown(self) -> None:
        """End in order: send what is queued, then BYE; the other side, having read all of it, does the same.

        Returns at once; frames go on arriving until the other side's BYE. The link is closed by force if that takes
        longer than `drain_seconds`. Later calls, and calls on a link that has ended, do nothing.
        """
        with self._lock:
            if self._state is LinkState.NEW:
                self._close_unstarted()
                return
            if self._state is not LinkState.OPEN:
                return
            self._is_shut_here = True
            self._begin_drain()
        self._wake()

    def close(self, *, wait_seconds: float = 5.0) -> None:
        """Drop the connection now and wait for the I/O thread (unless called on it). Idempotent."""
        self._decide(LinkEnd(EndCause.CLOSED_HERE, f"{self._name} was closed"))
        self.wait_ended(wait_seconds)

    def fail(self, reason: str) -> None:
        """Give the link up for a fault that the caller saw; returns at once. The other side sees a disconnect."""
        self._decide(LinkEnd(EndCause.FAILED_HERE, f"{self._name}: {reason}"))

    def wait_ended(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the link has ended and its listeners have returned; returns whether that is so."""
        thread = self._thread
        if thread is None:
            return self._state is LinkState.ENDED
        if thread is not threading.current_thread():
            thread.join(timeout_seconds)
        return not thread.is_alive()

    def _decide(self, end: LinkEnd) -> None:
        with self._lock:
            if self._state is LinkState.NEW:
                self._close_unstarted()
                return
            if self._verdict is None and self._state is not LinkState.ENDED:
                self._verdict = end
        self._wake()

    # The methods from here on expect the lock to be held, but for `_wake`.

    def _close_unstarted(self) -> None:
        self._state = LinkState.ENDED
        self._socket.close()

    def _begin_drain(self) -> None:
        self._state = LinkState.DRAINING
        self._queue.push(encode_header(BYE, 0), b"", force=True)

    def _raise_not_open(self) -> None:
        if self._state is LinkState.NEW:
            raise LocalProtocolError(f"{self._name} was not started")
        end = self._end or self._verdict
        raise LinkLost(end.detail if end is not None else f"{self._name} is shutting down")

    def _flush(self, num_writes: int) -> bool:
        """Offer the head of the queue to the socket at most `num_writes` times; returns whether the queue is empty."""
        if self._channel is None:
            return False
        try:
            for _ in range(num_writes):
                if not self._queue:
                    break
                num_taken = self._channel.send(self._queue.head()[:_WRITE_BYTES])
                if num_taken == 0:
                    break
                self._queue.taken(num_taken)
        except OSError as error:
            if self._verdict is None:
                self._verdict = self._disconnected(error)
        return not self._queue

    def _disconnected(self, error: OSError) -> LinkEnd:
        return LinkEnd(EndCause.DISCONNECTED, f"{self._name}: {error.strerror or error}")

    def _wake(self) -> None:
        with self._lock:
            if self._wake_descriptor >= 0:
                os.eventfd_write(self._wake_descriptor, 1)


class _Loop:
    """What the I/O thread of one link does, and the state that only it touches."""

    def __init__(self, link: Link, channel: Channel, wake_descriptor: int, router: Router, pulse: Pulse | None) -> None:
        self._link = link
        self._channel = channel
        self._wake_descriptor = wake_descriptor
        self._router = router
        self._pulse = pulse
        self._decoder = FrameDecoder(router.types)
        self._settings = link._settings
        self._liveness = link._liveness
        self._drain_deadline: float | None = None
        self._is_bye_received = False

    def run(self) -> None:
        link = self._link
        try:
            end = self._serve()
        except RemoteProtocolError as error:
            end = LinkEnd(EndCause.PROTOCOL, f"{link.name}: {error}")
        except Exception as error:  # noqa: BLE001  a receiver's bug ends its link, not the process
            _LOG.exception("%s: a receiver raised", link.name)
            end = LinkEnd(EndCause.RECEIVER_RAISED, f"{link.name}: {type(error).__name__}: {error}")
        with link._lock:
            link._state = LinkState.ENDED
            link._end = end
            link._wake_descriptor = -1
            self._channel.close()
        os.close(self._wake_descriptor)
        try:
            self._router.ended(link, end)
        except Exception:  # noqa: BLE001  the thread ends here either way
            _LOG.exception("%s: an end listener raised", link.name)

    def _serve(self) -> LinkEnd:
        link = self._link
        poller = select.poll()
        poller.register(self._wake_descriptor, select.POLLIN)
        channel_descriptor = self._channel.fileno()
        is_first_turn = True
        while True:
            with link._lock:
                if link._queue:
                    link._flush(4)
                verdict = link._verdict
                state = link._state
                has_output = bool(link._queue)
            if verdict is not None:
                return verdict
            if self._is_bye_received and not has_output:
                return self._parted()
            poller.register(channel_descriptor, select.POLLIN | (select.POLLOUT if has_output else 0))
            timeout = 0 if is_first_turn else self._timeout_milliseconds(state)
            ready = dict(poller.poll(timeout))
            if self._wake_descriptor in ready:
                os.eventfd_read(self._wake_descriptor)
            # On the first turn bytes may wait inside TLS, where the descriptor does not show them.
            is_readable = is_first_turn or bool(ready.get(channel_descriptor, 0) & _READABLE)
            is_first_turn = False
            end = self._read() if is_readable else None
            end = end or self._mind_time(is_readable=is_readable)
            if end is not None:
                return end

    def _read(self) -> LinkEnd | None:
        link = self._link
        for _ in range(_READS_PER_TURN):
            try:
                with link._lock:
                    data = self._channel.receive(_READ_BYTES)
                    has_pending = self._channel.has_pending()
            except OSError as error:
                return link._disconnected(error)
            if data is None:
                return None
            if not data:
                return self._ended_by_peer()
            for frame in self._decoder.receive(data):
                self._take(frame)
                if link._verdict is not None:
                    return link._verdict
            if not has_pending and len(data) < _READ_BYTES:
                return None
        return None

    def _take(self, frame: Frame) -> None:
        if self._is_bye_received:
            raise RemoteProtocolError(f"a {frame.type.name} frame came after BYE")
        if frame.type == BYE:
            self._is_bye_received = True
            with self._link._lock:
                if self._link._state is LinkState.OPEN:
                    self._link._begin_drain()
            return
        if frame.type == HEARTBEAT:
            self._liveness.heard(time.monotonic())
        self._router.deliver(self._link, frame)

    def _ended_by_peer(self) -> LinkEnd:
        name = self._link.name
        try:
            self._decoder.receive_eof()
        except RemoteProtocolError as error:
            return LinkEnd(EndCause.DISCONNECTED, f"{name}: {error}")
        if self._is_bye_received or self._link._is_shut_here:
            return self._parted()
        return LinkEnd(EndCause.DISCONNECTED, f"{name}: the other side vanished (connection closed without BYE)")

    def _parted(self) -> LinkEnd:
        if self._link._is_shut_here:
            return LinkEnd(EndCause.CLOSED_HERE, f"{self._link.name} was shut down")
        return LinkEnd(EndCause.CLOSED_BY_PEER, f"{self._link.name} was shut down by the other side")

    def _timeout_milliseconds(self, state: LinkState) -> int | None:
        """How long to poll: until the next heartbeat, death or the end of draining; None is for ever."""
        now = time.monotonic()
        if state is LinkState.DRAINING:
            if self._drain_deadline is None:
                self._drain_deadline = now + self._settings.drain_seconds
            until = self._drain_deadline
        elif self._pulse is None:
            return None
        else:
            until = self._liveness.next_timer()
        return max(0, math.ceil((until - now) * 1000))

    def _mind_time(self, *, is_readable: bool) -> LinkEnd | None:
        name = self._link.name
        now = time.monotonic()
        if self._drain_deadline is not None:
            if now < self._drain_deadline:
                return None
            seconds = self._settings.drain_seconds
            cause = EndCause.CLOSED_HERE if self._link._is_shut_here else EndCause.DISCONNECTED
            return LinkEnd(cause, f"{name}: the other side did not finish within {seconds:g} s of the shutdown")
        if self._pulse is None or self._link._state is not LinkState.OPEN:
            return None
        # Bytes that wait to be read may hold the heartbeat: after a pause of this process only silence counts.
        if not is_readable and self._liveness.is_dead(now):
            seconds = self._liveness.deadline_seconds
            return LinkEnd(EndCause.SILENT, f"{name}: no heartbeat for {seconds:g} s")
        if self._liveness.is_due(now):
            self._beat(self._pulse, now)
        return None

    def _beat(self, pulse: Pulse, now: float) -> None:
        self._liveness.sent(now)
        payload = pulse()
        if payload is None:
            return
        # A full queue or a link just shut down has its own way to end; a heartbeat less changes nothing.
        with contextlib.suppress(QueueFull, LinkLost):
            self._link.send(HEARTBEAT, payload)
