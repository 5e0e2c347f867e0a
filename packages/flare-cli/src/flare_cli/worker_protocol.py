"""What the API process and its worker process say to each other over their local link.

The API process sends the configuration first, then engine commands and requests for a snapshot. The worker sends
notices (stages of the start, readiness, failure, snapshots) and engine events. Values and frame types only.
"""

from __future__ import annotations

import msgspec

from flare_cli.snapshot import ClusterSnapshot
from flare_transport import FIRST_CONSUMER_CODE, FrameType, HeartbeatSettings, LinkSettings

__all__ = [
    "ABANDON",
    "COMMANDS",
    "CONFIGURATION",
    "EVENTS",
    "LOCAL_LINK_SETTINGS",
    "NOTICE",
    "SERVING_DEADLINE_SECONDS",
    "SNAPSHOT_QUERY",
    "DrainAsked",
    "Notice",
    "Ready",
    "SnapshotReply",
    "Stage",
    "StartFailed",
    "WorkerLost",
    "decode_notice",
    "encode_notice",
]

CONFIGURATION = FrameType(FIRST_CONSUMER_CODE, "CONFIGURATION", 1 << 20)
COMMANDS = FrameType(FIRST_CONSUMER_CODE + 1, "COMMANDS", 64 << 20)
SNAPSHOT_QUERY = FrameType(FIRST_CONSUMER_CODE + 2, "SNAPSHOT_QUERY", 1)
"""With any payload: with every record's state in the pool, too."""
EVENTS = FrameType(FIRST_CONSUMER_CODE + 3, "EVENTS", 64 << 20)
NOTICE = FrameType(FIRST_CONSUMER_CODE + 4, "NOTICE", 16 << 20)
ABANDON = FrameType(FIRST_CONSUMER_CODE + 5, "ABANDON", 0)
"""End at once, and the group with it: nothing has been served yet."""

LOCAL_LINK_SETTINGS = LinkSettings(
    max_queue_frames=1 << 16, max_queue_bytes=256 << 20, heartbeat=HeartbeatSettings(deadline_seconds=60.0)
)
"""Both ends are of one host and one owner: deep queues, so that a busy event loop does not end the engine. A process
that imports torch from a slow disk may be silent for long; once it serves, the API process expects more of it."""

SERVING_DEADLINE_SECONDS = HeartbeatSettings().deadline_seconds


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """The start goes on: ``text`` says what is being done; ``total`` 0 where its amount is not known."""

    text: str
    num_done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """Requests are taken from now on.

    Attributes:
        vocab_size, max_model_len: what prompts are checked against.
        facts: (label, text) lines about model, ranks and cache, for people.
    """

    vocab_size: int
    max_model_len: int
    facts: tuple[tuple[str, str], ...]


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The worker ends with this exit code because of what the message says."""

    message: str
    exit_code: int


class WorkerLost(msgspec.Struct, frozen=True, tag="lost"):
    """The worker is about to end: the group cannot go on."""

    message: str


class DrainAsked(msgspec.Struct, frozen=True, tag="drain_asked"):
    """A peer got the signal to end: the group is to be drained as if this process had got it."""

    rank: int


class SnapshotReply(msgspec.Struct, frozen=True, tag="snapshot"):
    """Answer to a query; ``with_records``: to one that asked for every record's state in the pool."""

    snapshot: ClusterSnapshot
    with_records: bool = False


Notice = Stage | Ready | StartFailed | WorkerLost | DrainAsked | SnapshotReply

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notice)


def encode_notice(notice: Notice) -> bytes:
    """Bytes of a NOTICE frame."""
    return _encoder.encode(notice)


def decode_notice(data: bytes | memoryview) -> Notice:
    """The notice in ``data``; raises ``msgspec.MsgspecError``."""
    try:
        return _decoder.decode(data)
    except RecursionError:
        msg = "nested too deeply"
        raise msgspec.DecodeError(msg) from None
