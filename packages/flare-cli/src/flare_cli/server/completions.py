"""``/v1/completions``: from a checked body to outputs, and from outputs to the answer's shape. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flare_cli.server.answer import OutputTotals, prompt_logprobs_object, token_string
from flare_cli.server.bodies import CompletionBody
from flare_cli.server.engine_port import EngineRequest
from flare_cli.server.generation import OutputRequest, Piece
from flare_cli.server.model import Limits, ServedModel
from flare_cli.server.params import check_token_ids, num_choices, sampling_params, stop_strings
from flare_core.errors import RequestError
from flare_core.plan import TokenLogprobs

__all__ = ["CompletionRenderer", "completion_requests", "prompt_texts"]

DEFAULT_MAX_TOKENS = 16
"""The API's default for completions."""


def prompt_texts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts, one each.

    Raises:
        RequestError: none, or strings and ids mixed.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    if not prompt or any(isinstance(item, int) for item in prompt):
        msg = "prompt: expected a string, a list of strings, a list of token ids, or a list of such lists"
        raise RequestError(msg, param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


def completion_requests(
    body: CompletionBody,
    prompts: Sequence[Sequence[int]],
    model: ServedModel,
    limits: Limits,
    *,
    tenant: str,
    random_seed: int,
) -> list[OutputRequest]:
    """One output request a prompt of token ids; raises ``RequestError``."""
    n = num_choices(body, len(prompts), limits)
    stops = stop_strings(body, limits)
    if body.stream and body.prompt_logprobs is not None:
        msg = "prompt_logprobs: not available in a stream"
        raise RequestError(msg, param="prompt_logprobs")
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        body = msgspec.structs.replace(body, prompt_logprobs=body.logprobs)
    requests: list[OutputRequest] = []
    for number, token_ids in enumerate(prompts):
        if not token_ids:
            msg = "prompt: is empty; at least one token is needed"
            raise RequestError(msg, param="prompt")
        check_token_ids(token_ids, model, param="prompt")
        params = sampling_params(
            body,
            model,
            limits,
            num_prompt_tokens=len(token_ids),
            prompt_field="prompt",
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            random_seed=random_seed + number & (1 << 64) - 1,
        )
        keep = params.max_tokens > 0
        params = msgspec.structs.replace(params, max_tokens=max(1, params.max_tokens))
        request = EngineRequest(token_ids, params, tenant, body.cache_salt or "")
        requests.append(OutputRequest(request, n, number * n, stops, keep))
    return requests


@dataclass(frozen=True, slots=True)
class CompletionRenderer:
    """Shapes completions.

    ``prompts`` holds each prompt's text for ``echo``, ``prompt_ids`` its token ids; ``n`` outputs a prompt.
    """

    answer_id: str
    created: int
    model: ServedModel
    body: CompletionBody
    prompts: Sequence[str]
    prompt_ids: Sequence[Sequence[int]]
    n: int

    def chunks(self, piece: Piece, outputs: Sequence[OutputTotals]) -> list[dict[str, Any]]:
        """One chunk for a piece with anything to show; the first of an output carries the echo."""
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return []
        totals = outputs[piece.index]
        choice = self._choice(
            piece.index, piece.text, piece.logprobs, outputs, offset=totals.num_chars, echo=totals.num_chunks == 0
        )
        totals.num_chunks += 1
        totals.num_chars += len(choice["text"])
        return [self._frame([choice | {"finish_reason": piece.finish_reason}])]

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk."""
        return self._frame([]) | {"usage": usage}

    def whole(self, outputs: Sequence[OutputTotals], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer."""
        choices: list[dict[str, Any]] = []
        for index, totals in enumerate(outputs):
            choice = self._choice(index, "".join(totals.text), totals.logprobs, outputs, offset=0, echo=True)
            choice["finish_reason"] = totals.finish_reason
            if self.body.prompt_logprobs is not None:
                scored = outputs[index - index % self.n].prompt_logprobs
                choice["prompt_logprobs"] = prompt_logprobs_object(
                    scored, self.body.prompt_logprobs, self.model.tokenizer
                )
            choices.append(choice)
        return self._frame(choices) | {"usage": usage}

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs],
        outputs: Sequence[OutputTotals],
        *,
        offset: int,
        echo: bool,
    ) -> dict[str, Any]:
        lead: Sequence[int] = ()
        if echo and self.body.echo:
            text = self.prompts[index // self.n] + text
            lead = self.prompt_ids[index // self.n]
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self.body.logprobs is not None:
            scored = outputs[index - index % self.n].prompt_logprobs if lead else ()
            choice["logprobs"] = self._logprobs_object(lead, [*scored, *logprobs], offset)
        return choice

    def _logprobs_object(self, lead: Sequence[int], entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """``entries`` in the API's four parallel lists; with a prompt in the lead its first token has no entry."""
        num_top = self.body.logprobs or 0
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        if lead:
            tokens.append(token_string(self.model.tokenizer, lead[0]))
            values.append(None)
            tops.append(None)
        for entry in entries:
            token = token_string(self.model.tokenizer, entry.token_id)
            top = {token_string(self.model.tokenizer, token_id): value for token_id, value in entry.top[:num_top]}
            if num_top:
                top.setdefault(token, entry.logprob)
            tokens.append(token)
            values.append(entry.logprob)
            tops.append(top)
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += 0 if token.startswith("bytes:") else len(token)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
