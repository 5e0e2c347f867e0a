"""The frame types of this package, codes 0 to 31, and their limits. Consumers declare theirs from code 32 on."""

from flare_transport.framing import FrameType

__all__ = [
    "ACCEPT",
    "ALL_FRAME_TYPES",
    "BULK_ACCEPT",
    "BULK_HELLO",
    "BULK_PROOF",
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
    "SERVICE_ACCEPT",
    "SERVICE_HELLO",
    "SERVICE_PROOF",
    "SERVICE_REFUSE",
    "SERVICE_WELCOME",
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
SERVICE_HELLO = FrameType(15, "SERVICE_HELLO", 40 + MAX_CERTIFICATE_BYTES)
SERVICE_WELCOME = FrameType(16, "SERVICE_WELCOME", 102 + MAX_CERTIFICATE_BYTES)
SERVICE_PROOF = FrameType(17, "SERVICE_PROOF", 32)
SERVICE_ACCEPT = FrameType(18, "SERVICE_ACCEPT", 0)
SERVICE_REFUSE = FrameType(19, "SERVICE_REFUSE", 8)
BULK_HELLO = FrameType(20, "BULK_HELLO", 48)
BULK_ACCEPT = FrameType(21, "BULK_ACCEPT", 64)
BULK_PROOF = FrameType(22, "BULK_PROOF", 32)

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
    SERVICE_HELLO,
    SERVICE_WELCOME,
    SERVICE_PROOF,
    SERVICE_ACCEPT,
    SERVICE_REFUSE,
    BULK_HELLO,
    BULK_ACCEPT,
    BULK_PROOF,
)


def by_code(*frame_types: FrameType) -> dict[int, FrameType]:
    """Return the mapping that a `FrameDecoder` reads."""
    return {frame_type.code: frame_type for frame_type in frame_types}
