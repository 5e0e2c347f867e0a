"""One HTTP request's outputs: submits them, decodes their tokens to text, ends them at stop strings.

Owns the request's queue and the ids of its outputs: whatever way it ends, nothing of it stays in the engine. Knows
neither the shape of answers (``completions``, ``chat``) nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from flare_cli.server.engine_port import (
    Engine,
    EngineRequest,
    Finished,
    Lost,
    OutputEvent,
    OutputQueue,
    PromptScored,
    Tokens,
)
from flare_cli.server.errors import EngineUnavailable
from flare_cli.text.detokenizer import Detokenizer, open_detokenizer
from flare_cli.text.stop_strings import StopMatcher
from flare_cli.text.tokenizer import Tokenizer
from flare_core.errors import RequestError
from flare_core.plan import TokenLogprobs
from flare_core.prefix import Tier
from flare_core.sampling import choice_seed

__all__ = ["Generation", "OutputRequest", "Piece"]

FINISH_STOP = "stop"


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """A prompt with its ``n`` choices; choice i is output number ``first_index + i``.

    Without ``keep_output`` only the prompt's log-probabilities are wanted (``max_tokens`` 0).
    """

    request: EngineRequest
    n: int
    first_index: int
    stops: tuple[str, ...] = ()
    keep_output: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """What one output has new.

    Attributes:
        index: of the output.
        text: may be empty.
        logprobs: of the tokens whose text is out, one each.
        prompt_logprobs: of prompt positions from 1 on, in order.
        num_tokens: output tokens that the piece accounts for (those of a stop included).
        finish_reason: "stop" or "length" in the last piece, else None.
        cached_tokens: in the last piece, prompt tokens by tier.
        draft_tokens, accepted_tokens: in the last piece.
    """

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    cached_tokens: Mapping[Tier, int] = field(default_factory=dict)
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class _Output:
    """One output in work."""

    index: int
    request_id: str
    request: EngineRequest
    detokenizer: Detokenizer
    matcher: StopMatcher
    keep: bool
    num_tokens: int = 0
    num_chars: int = 0
    """Characters decoded so far."""
    num_sent: int = 0
    """Characters let out so far."""
    waiting: list[tuple[int, int, TokenLogprobs]] = field(default_factory=list)
    """Log-probabilities of tokens whose text is held back: (first character, end, entry)."""

    @property
    def is_complete(self) -> bool:
        """A stop string was found: what the engine still gives is not wanted."""
        return self.matcher.matched is not None

    def push(self, event: Tokens) -> Piece:
        """The piece for new tokens; none behind a stop string."""
        params = self.request.params
        if not self.keep or self.is_complete:
            return Piece(self.index)
        text: list[str] = []
        released: list[TokenLogprobs] = []
        num_tokens = 0
        for at, token_id in enumerate(event.token_ids):
            num_tokens += 1
            self.num_tokens += 1
            if token_id in params.stop_token_ids and self.num_tokens > params.min_tokens:
                continue  # it ends the output and is no part of the text
            first = self.num_chars
            decoded = self.detokenizer.push(token_id)
            self.num_chars += len(decoded)
            if event.logprobs:
                self.waiting.append((first, self.num_chars, event.logprobs[at]))
            may_stop = self.num_tokens > params.min_tokens
            text.append(self._let_out(self.matcher.push(decoded) if may_stop else self.matcher.skip(decoded)))
            if self.matcher.matched is not None:
                break
            released += self._release()
        if self.matcher.matched is not None:
            released += [entry for first, _, entry in self.waiting if first < self.num_sent]
            self.waiting.clear()
        return Piece(self.index, "".join(text), tuple(released), num_tokens=num_tokens)

    def end(self, event: Finished) -> Piece:
        """The last piece: text that was held back comes out, unless it turns out to hold a stop string."""
        text = self._let_out(self.matcher.push(self.detokenizer.flush()))
        if not self.is_complete:
            text += self._let_out(self.matcher.flush())
        released = tuple(entry for first, _, entry in self.waiting if not self.is_complete or first < self.num_sent)
        reason = FINISH_STOP if self.is_complete else event.reason
        return Piece(
            self.index,
            text,
            released,
            finish_reason=reason,
            cached_tokens=event.cached_tokens,
            draft_tokens=event.draft_tokens,
            accepted_tokens=event.accepted_tokens,
        )

    def _let_out(self, text: str) -> str:
        self.num_sent += len(text)
        return text

    def _release(self) -> list[TokenLogprobs]:
        count = 0
        while count < len(self.waiting) and self.waiting[count][1] <= self.num_sent:
            count += 1
        entries = [entry for _, _, entry in self.waiting[:count]]
        del self.waiting[:count]
        return entries


class Generation:
    """The outputs of one HTTP request. Use as an asynchronous context manager, then iterate ``pieces`` once.

    Choices 1 to n-1 of a prompt are submitted when choice 0 has its first token: by then the prompt's pages can be
    shared, and it is computed once.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, requests: Sequence[OutputRequest]) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._requests = requests
        self._queue: OutputQueue = asyncio.Queue()
        self._outputs: dict[int, _Output] = {}
        self._held: dict[int, OutputRequest] = {}
        """Prompts whose further choices wait, by the index of their choice 0."""

    async def __aenter__(self) -> Generation:
        try:
            for request in self._requests:
                self._submit(request, 0)
                if request.n > 1:
                    self._held[request.first_index] = request
        except BaseException:
            self._cancel_all()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel_all()

    async def pieces(self, *, idle_seconds: float) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, all that are ready at once; an empty list after ``idle_seconds`` without one.

        Raises:
            EngineUnavailable: a rank was lost. RequestError: the engine refused or failed a request.
        """
        while self._outputs:
            pieces: list[Piece] = []
            try:
                async with asyncio.timeout(idle_seconds):
                    tag, event = await self._queue.get()
            except TimeoutError:
                yield pieces
                continue
            failure = self._take(tag, event, pieces)
            while failure is None and not self._queue.empty():
                failure = self._take(*self._queue.get_nowait(), pieces)
            if pieces:
                yield pieces
            if failure is not None:
                raise failure

    def _take(self, tag: int, event: OutputEvent, pieces: list[Piece]) -> EngineUnavailable | RequestError | None:
        """Appends what the event gives; returns what ends the whole request, to be raised behind it."""
        output = self._outputs.get(tag)
        if output is None:
            return None
        match event:
            case Tokens():
                self._submit_held(tag)
                was_complete = output.is_complete
                pieces.append(output.push(event))
                if output.is_complete and not was_complete:
                    self._engine.end(output.request_id)
            case PromptScored(logprobs):
                pieces.append(Piece(output.index, prompt_logprobs=logprobs))
            case Finished():
                self._submit_held(tag)
                del self._outputs[tag]
                pieces.append(output.end(event))
            case Lost() if output.is_complete:
                del self._outputs[tag]
                pieces.append(output.end(Finished(FINISH_STOP)))
            case Lost(message, status):
                del self._outputs[tag]
                return EngineUnavailable(message) if status == 503 else RequestError(message, status=status)
        return None

    def _submit_held(self, tag: int) -> None:
        request = self._held.pop(tag, None)
        if request is not None:
            for choice in range(1, request.n):
                self._submit(request, choice)

    def _submit(self, request: OutputRequest, choice: int) -> None:
        params = request.request.params
        if choice:
            # The prompt is scored once, with choice 0.
            seed = choice_seed(params.seed, choice)
            params = msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
        chosen = replace(request.request, params=params)
        index = request.first_index + choice
        request_id = self._engine.submit(chosen, self._queue, index)
        self._outputs[index] = _Output(
            index=index,
            request_id=request_id,
            request=chosen,
            detokenizer=open_detokenizer(self._tokenizer),
            matcher=StopMatcher(request.stops),
            keep=request.keep_output,
        )

    def _cancel_all(self) -> None:
        for output in self._outputs.values():
            self._engine.cancel(output.request_id)
        self._outputs.clear()
        self._held.clear()
