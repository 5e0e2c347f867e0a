"""Request bodies: what a client may send, field by field, and what becomes of fields that flare does not know.

Owns decoding and type checks. Does not know defaults of the model or limits of the server (``params``).

Unknown fields are told apart: harmless ones (they cannot change the output) are ignored; everything else is refused by
name, because a client that believes that a setting works is worse off than one with an error. ``null`` is "not set".
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from flare_core.errors import RequestError

__all__ = [
    "CacheResetBody",
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "DetokenizeBody",
    "SamplingBody",
    "StreamOptions",
    "TokenizeBody",
    "decode_body",
]

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of the OpenAI API that cannot change what is generated."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Values of refused fields that ask for nothing beyond plain text."""

_REFUSED = {
    "tools": "tools are not supported",
    "tool_choice": "tools are not supported",
    "functions": "tools are not supported",
    "function_call": "tools are not supported",
    "response_format": "structured output is not supported; only {'type': 'text'} is",
    "modalities": "only text is generated",
    "suffix": "insertion is not supported",
    "best_of": "is not supported; use n",
    "use_beam_search": "beam search is not supported",
}

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Salt = Annotated[str, msgspec.Meta(max_length=1024)]
TemplateName = Annotated[str, msgspec.Meta(max_length=64, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
TemplateValue = Annotated[str, msgspec.Meta(max_length=4096)] | int | float | bool | None
TemplateSettings = Annotated[dict[TemplateName, TemplateValue], msgspec.Meta(max_length=32)]
"""Variables that a client may set in the model's chat template, such as ``enable_thinking``: plain values only."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """``stream_options``."""

    include_usage: bool = False


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt``: a string, token ids, or a list of either."""

    prompt: str | list[str | Token | list[Token]]
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A part of a message's content; only text is known."""

    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation; roles as in the API, but for tools."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=16384)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateSettings | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: ``prompt``, or ``messages`` for the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateSettings | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[Token]
    model: str | None = None


class CacheResetBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/cache/reset``."""

    tier: str = "device"


Body = TypeVar("Body", bound=msgspec.Struct)


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """``data`` as ``kind``.

    Raises:
        RequestError: not JSON, a value of the wrong type or out of range, or a refused field; ``param`` names it.
    """
    try:
        fields = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        msg = f"the body is not JSON: {error}"
        raise RequestError(msg) from None
    if not isinstance(fields, dict):
        msg = "the body must be a JSON object"
        raise RequestError(msg)
    return convert_fields(fields, kind)


def convert_fields(fields: dict[str, Any], kind: type[Body], *, where: str = "") -> Body:
    """``fields`` as ``kind``, after the rules for unknown fields; raises as :func:`decode_body`."""
    known = set(kind.__struct_fields__)
    given: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name in HARMLESS or value in _NEUTRAL.get(name, ()):
            continue
        if name in _REFUSED:
            if name == "best_of" and value == fields.get("n", 1):
                continue
            msg = f"{where}{name}: {_REFUSED[name]}"
            raise RequestError(msg, param=f"{where}{name}", code="unsupported_parameter")
        if name not in known:
            msg = f"unknown field {where}{name}: it is refused because it might be meant to change the output"
            raise RequestError(msg, param=f"{where}{name}", code="unknown_parameter")
        given[name] = value
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _field_error(error, where) from None
    except RecursionError:
        msg = "the body is nested too deeply"
        raise RequestError(msg) from None


def _field_error(error: msgspec.ValidationError, where: str) -> RequestError:
    text, _, place = str(error).partition(" - at `")
    path = place.rpartition("$")[2]  # "$.seed`", and for the key of an object "key` in `$.logit_bias`"
    param = where + path.strip("`").lstrip(".")
    if not path and "required field" in text:
        param = where + text.partition("required field `")[2].rstrip("`")
    message = f"{param}: {text}" if param else text
    return RequestError(message, param=param or None)
