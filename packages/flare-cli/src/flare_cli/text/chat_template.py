"""The model's own chat template, rendered in a sandbox within bounds of time and size.

Owns Jinja's environment and its limits. Templates come from the model directory only, never from a request. Does not
know HTTP bodies: messages arrive as plain dictionaries that the server has checked.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from flare_core.errors import CheckpointError, RequestError

__all__ = ["ChatTemplate", "load_chat_template"]

MAX_TEMPLATE_BYTES = 1 << 20
RENDER_SECONDS = 1.0

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TAKEN_NAMES = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now", *_SPECIAL_TOKENS}
)
"""Variables that the server sets, or leaves unset on purpose."""


class ChatTemplate:
    """A compiled template with the special tokens it may name."""

    def __init__(self, template: jinja2.Template, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int,
        add_generation_prompt: bool,
        settings: Mapping[str, object],
    ) -> str:
        """The prompt; ``settings`` are further variables of the template, such as ``enable_thinking``.

        Blocks up to a second; call it outside the event loop.

        Raises:
            RequestError: a setting has a name that is taken, the template refuses these messages, takes too long, or
                gives too much.
        """
        for name in settings:
            if name in _TAKEN_NAMES:
                msg = f"chat_template_kwargs: {name!r} is not the client's to set"
                raise RequestError(msg, param="chat_template_kwargs")
        deadline = time.monotonic() + RENDER_SECONDS
        parts: list[str] = []
        num_chars = 0
        try:
            pieces = self._template.generate(
                {**self._special_tokens, **settings},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
            for piece in pieces:
                parts.append(piece)
                num_chars += len(piece)
                if num_chars > max_chars or time.monotonic() > deadline:
                    msg = "the chat template gives more than the limit of time or size for these messages"
                    raise RequestError(msg, param="messages")
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            msg = f"the model's chat template refuses these messages: {str(error)[:300]}"
            raise RequestError(msg, param="messages") from None
        return "".join(parts)


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """The template of a model directory, or None where it brings none. Reads files.

    Raises:
        CheckpointError: the template cannot be compiled.
    """
    settings = _read_json(directory / "tokenizer_config.json")
    source = _template_source(directory, settings)
    if source is None:
        return None
    if len(source) > MAX_TEMPLATE_BYTES:
        msg = f"{directory}: the chat template is larger than {MAX_TEMPLATE_BYTES} bytes"
        raise CheckpointError(msg)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        msg = f"{directory}: the chat template cannot be compiled: {error}"
        raise CheckpointError(msg) from None
    return ChatTemplate(template, _special_tokens(settings))


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    alone = directory / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        # Several named templates: the one without tools is called "default".
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path}: not JSON: {error}"
        raise CheckpointError(msg) from None
    return value if isinstance(value, dict) else {}


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _to_json(value: object, *, indent: int | None = None) -> str:
    # Not Jinja's own filter, which escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)
