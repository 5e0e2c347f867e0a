"""What rank zero of the benchmark asks of its peers over the control links, and what they answer. Values and codecs."""

from __future__ import annotations

import enum

import msgspec

from flare_cli.bench_cache.settings import GroupSettings
from flare_transport import FrameType, LinkOffer

__all__ = ["ORDER", "REPORT", "Order", "OrderKind", "PeerStart", "Report", "decode_order", "decode_report", "encode"]

ORDER = FrameType(48, "BENCH_ORDER", 4096)
REPORT = FrameType(49, "BENCH_REPORT", 64 << 10)


class PeerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer process reads from its standard input, as JSON. ``key`` is the group's, drawn for this run."""

    settings: GroupSettings
    rank: int
    host: str
    port: int
    key: bytes


class OrderKind(enum.StrEnum):
    """What to do. JOIN: open memory, directory and the offered record link. The rest: see ``BenchRank``."""

    JOIN = "join"
    FILL = "fill"
    WIPE = "wipe"
    VERIFY = "verify"
    SCAN = "scan"
    RAW_READ = "raw-read"


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One order to every peer; each answers with one report."""

    kind: OrderKind
    offer: LinkOffer | None = None


class Report(msgspec.Struct, frozen=True, array_like=True):
    """An order was carried out, or ``problem`` says what is wrong."""

    problem: str = ""


_order_decoder = msgspec.msgpack.Decoder(Order)
_report_decoder = msgspec.msgpack.Decoder(Report)


def encode(message: Order | Report) -> bytes:
    """Payload of a frame."""
    return msgspec.msgpack.encode(message)


def decode_order(payload: memoryview) -> Order:
    """Raises msgspec.DecodeError; so does the decoder below."""
    return _order_decoder.decode(payload)


def decode_report(payload: memoryview) -> Report:
    """The report in ``payload``."""
    return _report_decoder.decode(payload)
