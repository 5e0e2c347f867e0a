"""The frame types of this package, codes 0 to 31, and their limits. Consumers declare theirs from code 32 on."""

from flare_transport.framing import FrameType

__all__ = [
    "ACCEPT",
    "ALL_FRAME_TYPES",
    "BYE",
    "COMPLETE",
    "EXCHANGE_PART",
    "EXCHANGE_WHOLE",
    "FIRST_CONSUMER_CODE",
    "HEARTBEAT",
    "HELLO",
    "KEY_VALUE_REPLY",
    "KEY_VALUE_REQUEST",
    "LINK_ACCEPT",
    "LINK_PROOF",
    "MAX_CERTIFICATE_BYTES",
    "PROOF",
    "REFUSE",
    "WELCOME",
    "by_code",
]

FIRST_CONSUMER_CODE = 32

MAX_CERTIFICATE_BYTES = 4096

HELLO = FrameType(1, "HELLO", 48 + MAX_CERTIFICATE_BYTES)
WELCOME = FrameType(2, "WELCOME", 90 + MAX_CERTIFICATE_BYTES)
PROOF = FrameType(3, "PROOF", 32)
ACCEPT = FrameType(4, "ACCEPT", 0)
REFUSE = FrameType(5, "REFUSE", 12)
COMPLETE = FrameType(6, "COMPLETE", 0)
LINK_PROOF = FrameType(7, "LINK_PROOF", 32)
LINK_ACCEPT = FrameType(8, "LINK_ACCEPT", 32)
HEARTBEAT = FrameType(9, "HEARTBEAT", 256)
BYE = FrameType(10, "BYE", 0)
KEY_VALUE_REQUEST = FrameType(11, "KEY_VALUE_REQUEST", (1 << 20) + 1024)
KEY_VALUE_REPLY = FrameType(12, "KEY_VALUE_REPLY", (1 << 20) + 1024)
EXCHANGE_PART = FrameType(13, "EXCHANGE_PART", 16 << 20)
EXCHANGE_WHOLE = FrameType(14, "EXCHANGE_WHOLE", 64 << 20)

ALL_FRAME_TYPES = (
    HELLO,
    WELCOME,
    PROOF,
    ACCEPT,
    REFUSE,
    COMPLETE,
    LINK_PROOF,
    LINK_ACCEPT,
    HEARTBEAT,
    BYE,
    KEY_VALUE_REQUEST,
    KEY_VALUE_REPLY,
    EXCHANGE_PART,
    EXCHANGE_WHOLE,
)


def by_code(*frame_types: FrameType) -> dict[int, FrameType]:
    """Return the mapping that a `FrameDecoder` reads."""
    return {frame_type.code: frame_type for frame_type in frame_types}
