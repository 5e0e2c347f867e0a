"""What travels between a server and the engine: requests and commands in, events out.

Plain values that msgspec encodes, so that server and engine may be two processes. Every added request gets exactly
one :class:`Finished` or :class:`Failed`, after all of its :class:`Tokens`.
"""

from __future__ import annotations

import enum
from typing import TypeVar

import msgspec

from flare_core.plan import TokenLogprobs
from flare_core.prefix import Tier
from flare_core.sampling import SamplingParams

__all__ = [
    "AddRequest",
    "CacheReset",
    "CancelRequest",
    "Command",
    "Drain",
    "EngineEvent",
    "EngineRequest",
    "Failed",
    "FinishReason",
    "Finished",
    "Phase",
    "Progress",
    "PromptLogprobs",
    "ResetCache",
    "Stop",
    "Tokens",
    "Usage",
    "decode_commands",
    "decode_events",
    "encode_commands",
    "encode_events",
]


class FinishReason(enum.StrEnum):
    """Why a request ended. STOP: a stop token. LENGTH: ``max_tokens`` or the model's limit. CANCELLED: by command."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One output to make for one prompt (a request for ``n`` outputs is ``n`` of these).

    Attributes:
        request_id: unique among the requests that have not ended.
        token_ids: the prompt, u32 little endian, at least one token.
        params: final sampling parameters.
        salt: separates prefix caches (``keys.tenant_salt``); requests share prefixes only under equal salts.
        arrival: ``time.monotonic()`` when the server had the request; waiting times count from here.
    """

    request_id: str
    token_ids: bytes
    params: SamplingParams
    salt: bytes = b""
    arrival: float = 0.0


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Serve a request."""

    request: EngineRequest


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a request in whatever state; it ends CANCELLED. Unknown and ended ids are ignored."""

    request_id: str


class ResetCache(msgspec.Struct, frozen=True, tag="reset"):
    """Forget what ``tier`` (device or memory) holds and no running request uses; answered by :class:`CacheReset`."""

    reset_id: str
    tier: Tier


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new requests (503), finish the others and all stores, then leave the loop."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop at once; requests that have not ended fail with 503."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request. ``cached_tokens`` counts prompt tokens that were not computed, by tier; ``draft_tokens``
    those that were proposed, and ``accepted_tokens`` those of them that the output has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: dict[Tier, int] = msgspec.field(default_factory=dict)
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Output tokens in order, a final stop token included. ``logprobs`` has one entry a token where asked for."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """Further entries for the prompt's tokens, in order from its second token on; all come before the first token."""

    request_id: str
    entries: tuple[TokenLogprobs, ...]


class Phase(enum.StrEnum):
    """What a request without output is doing."""

    RESTORE = "restore"
    PREFILL = "prefill"


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Sign of life before the first token: ``num_done`` of ``num_total`` prompt tokens are there or on their way."""

    request_id: str
    phase: Phase
    num_done: int
    num_total: int


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The request ended."""

    request_id: str
    reason: FinishReason
    usage: Usage


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request ended with an error, as ``RequestError`` carries it."""

    request_id: str
    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None


class CacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    """Answer to :class:`ResetCache`; ``failure`` says why nothing was done."""

    reset_id: str
    tier: Tier
    failure: str | None = None


_T = TypeVar("_T")

Command = AddRequest | CancelRequest | ResetCache | Drain | Stop
EngineEvent = Tokens | PromptLogprobs | Progress | Finished | Failed | CacheReset

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(list[Command])
_event_decoder = msgspec.msgpack.Decoder(list[EngineEvent])


def encode_commands(commands: list[Command]) -> bytes:
    """Bytes of ``commands``."""
    return _encoder.encode(commands)


def decode_commands(data: bytes | memoryview) -> list[Command]:
    """Commands in ``data``.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: not commands.
    """
    return _decoded(_command_decoder, data)


def encode_events(events: list[EngineEvent]) -> bytes:
    """Bytes of ``events``."""
    return _encoder.encode(events)


def decode_events(data: bytes | memoryview) -> list[EngineEvent]:
    """Events in ``data``.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: not events.
    """
    return _decoded(_event_decoder, data)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview) -> _T:
    try:
        return decoder.decode(data)
    except RecursionError:
        msg = "nested too deeply"
        raise msgspec.DecodeError(msg) from None
