"""The bounded queue of what a link has yet to send. Pure: holds buffers, knows no socket, no lock and no frame type."""

from collections import deque

from flare_transport.errors import QueueFull
from flare_transport.framing import Buffer

__all__ = ["SendQueue"]

# Below this a frame is one buffer, so that it leaves in one system call and one TLS record.
_JOIN_BELOW_BYTES = 1 << 16


class SendQueue:
    """Frames in order, bounded in number and in bytes. A frame counts until its last byte was taken.

    An empty queue takes a frame of any size, so the bound on bytes is `max_bytes` or the one frame that exceeds it.
    """

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        # (buffer, whether it is the last of its frame)
        self._buffers: deque[tuple[memoryview, bool]] = deque()
        self.num_frames = 0
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return self.num_frames > 0

    def push(self, header: bytes, payload: Buffer, *, force: bool = False) -> None:
        """Append one frame; raises `QueueFull`, having queued nothing, unless `force` (for a link's own last word)."""
        num_bytes = len(header) + len(payload)
        over = self.num_frames >= self._max_frames or self.num_bytes + num_bytes > self._max_bytes
        if over and self.num_frames and not force:
            raise QueueFull(
                f"{self.num_frames} frames ({self.num_bytes} bytes) wait to be sent; "
                f"the limits are {self._max_frames} frames and {self._max_bytes} bytes"
            )
        if num_bytes < _JOIN_BELOW_BYTES:
            self._buffers.append((memoryview(b"".join((header, payload))), True))
        else:
            self._buffers.append((memoryview(header), False))
            self._buffers.append((memoryview(payload), True))
        self.num_frames += 1
        self.num_bytes += num_bytes

    def head(self) -> memoryview:
        """Return the bytes to send next; unchanged until `taken` is called. The queue must not be empty."""
        return self._buffers[0][0]

    def taken(self, num_bytes: int) -> None:
        """The first `num_bytes` of the head were sent."""
        buffer, is_last = self._buffers[0]
        self.num_bytes -= num_bytes
        if num_bytes < len(buffer):
            self._buffers[0] = (buffer[num_bytes:], is_last)
            return
        self._buffers.popleft()
        if is_last:
            self.num_frames -= 1
