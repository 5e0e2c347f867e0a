"""``/v1/chat/completions``: messages to a prompt by the model's template, and outputs to the answer's shape.

Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flare_cli.server.answer import OutputTotals, prompt_logprobs_object, token_string
from flare_cli.server.bodies import ChatBody, ChatMessage, convert_fields
from flare_cli.server.engine_port import EngineRequest
from flare_cli.server.generation import OutputRequest, Piece
from flare_cli.server.model import Limits, ServedModel
from flare_cli.server.params import max_tokens_field, num_choices, sampling_params, stop_strings
from flare_core.errors import RequestError
from flare_core.plan import TokenLogprobs

__all__ = ["ChatRenderer", "chat_prompt", "chat_request", "template_messages"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of the API to roles that templates know."""

_EMPTY_ASSISTANT_FIELDS = frozenset({"tool_calls", "annotations", "audio", "function_call", "refusal"})
"""What the official client sends back with an assistant's message; ignored where it is empty."""

MAX_PROMPT_CHARS = 64 << 20


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked messages as templates expect them: a role and a text.

    Raises:
        RequestError: an unknown role, a content part that is not text, an unknown field; names its place.
    """
    checked: list[dict[str, Any]] = []
    for number, fields in enumerate(messages):
        where = f"messages[{number}]."
        given = {name: value for name, value in fields.items() if value or name not in _EMPTY_ASSISTANT_FIELDS}
        named = given.get("role")
        if isinstance(named, str) and named not in _ROLES:
            # Before its fields are looked at: those of a tool's message are unknown, but that is not the point.
            msg = f"{where}role: {named[:40]!r} is not supported; roles are {', '.join(_ROLES)}"
            raise RequestError(msg, param=f"{where}role")
        message = convert_fields(given, ChatMessage, where=where)
        role = _ROLES[message.role]
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        if content is None and role != "assistant":
            msg = f"{where}content: is missing"
            raise RequestError(msg, param=f"{where}content")
        entry = {"role": role, "content": content or ""}
        if message.name is not None:
            entry["name"] = message.name
        checked.append(entry)
    return checked


def chat_prompt(
    messages: Sequence[dict[str, Any]], model: ServedModel, settings: Mapping[str, object] | None = None
) -> list[int]:
    """Token ids of the prompt; ``settings`` are variables for the template.

    Blocks up to a second and more for long texts; call it outside the event loop.

    Raises:
        RequestError: the model has no template, or it refuses the messages.
    """
    if model.chat_template is None:
        msg = "this model has no chat template; use /v1/completions"
        raise RequestError(msg, param="messages", code="no_chat_template")
    checked = template_messages(messages)
    text = model.chat_template.render(
        checked, max_chars=MAX_PROMPT_CHARS, add_generation_prompt=True, settings=settings or {}
    )
    return model.tokenizer.encode(text, add_special_tokens=False)


def chat_request(
    body: ChatBody, token_ids: Sequence[int], model: ServedModel, limits: Limits, *, tenant: str, random_seed: int
) -> OutputRequest:
    """The output request of a chat; raises ``RequestError``."""
    n = num_choices(body, 1, limits)
    stops = stop_strings(body, limits)
    if body.top_logprobs is not None and not body.logprobs:
        msg = "top_logprobs: needs logprobs true"
        raise RequestError(msg, param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        msg = "prompt_logprobs: not available in a stream"
        raise RequestError(msg, param="prompt_logprobs")
    params = sampling_params(
        body,
        model,
        limits,
        num_prompt_tokens=len(token_ids),
        prompt_field="messages",
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        random_seed=random_seed,
    )
    if params.max_tokens < 1:
        name = max_tokens_field(body)
        msg = f"{name}: must be at least 1"
        raise RequestError(msg, param=name)
    request = EngineRequest(token_ids, params, tenant, body.cache_salt or "")
    return OutputRequest(request, n, 0, stops)


@dataclass(frozen=True, slots=True)
class ChatRenderer:
    """Shapes chat completions."""

    answer_id: str
    created: int
    model: ServedModel
    body: ChatBody

    def chunks(self, piece: Piece, outputs: Sequence[OutputTotals]) -> list[dict[str, Any]]:
        """Chunks for a piece: the first of an output names the role."""
        totals = outputs[piece.index]
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return []
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if totals.num_chunks == 0 else {}
        if piece.text:
            delta["content"] = piece.text
        totals.num_chunks += 1
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs_object(piece.logprobs),
            "finish_reason": piece.finish_reason,
        }
        return [self._frame("chat.completion.chunk", [choice])]

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk."""
        return self._frame("chat.completion.chunk", []) | {"usage": usage}

    def whole(self, outputs: Sequence[OutputTotals], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(totals.text), "refusal": None},
                "logprobs": self._logprobs_object(totals.logprobs),
                "finish_reason": totals.finish_reason,
            }
            for index, totals in enumerate(outputs)
        ]
        answer = self._frame("chat.completion", choices) | {"usage": usage}
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_object(
                outputs[0].prompt_logprobs, self.body.prompt_logprobs, self.model.tokenizer
            )
        return answer

    def _frame(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }

    def _logprobs_object(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        num_top = self.body.top_logprobs or 0
        return {
            "content": [
                self._token(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._token(*alternative) for alternative in entry.top[:num_top]]}
                for entry in entries
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_string(self.model.tokenizer, token_id),
            "logprob": logprob,
            "bytes": list(self.model.tokenizer.token_bytes(token_id)),
        }
