"""Requests whose end is a value: answered, refused, or broken off, with what had come by then.

Greedy, with top log-probabilities, so that two answers can be compared bit for bit.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from flare_qualify.client import Answer, ServerError, TopLogprobs, complete, post_json

__all__ = ["ANSWER_TOKENS", "TOP_LOGPROBS", "Attempt", "ask", "attempt", "begin", "drop_device_copies"]

ANSWER_TOKENS = 16
TOP_LOGPROBS = 5


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of one request.

    Attributes:
        answer: where it was answered whole.
        status: HTTP status; 0 where the connection was refused or broke before any.
        text, logprobs: what came, of a broken stream too.
        seconds: until its end.
    """

    answer: Answer | None
    status: int
    message: str
    text: str
    logprobs: tuple[TopLogprobs, ...]
    seconds: float

    @property
    def is_refused(self) -> bool:
        """503, and not a byte of output."""
        return self.answer is None and self.status == 503 and not self.text

    @property
    def is_broken(self) -> bool:
        """Ended by the connection or without a finish reason, after or before output; not by an error status."""
        return self.answer is None and self.status in {0, 200}


def ask(url: str, prompt: list[int] | str, *, max_tokens: int = ANSWER_TOKENS, **options: Any) -> Answer:
    """One greedy streamed completion that runs to ``max_tokens``; raises as :func:`flare_qualify.client.complete`."""
    fields = {"logprobs": TOP_LOGPROBS, "ignore_eos": True, "timeout": 120.0} | options
    return complete(url, prompt, max_tokens=max_tokens, **fields)


def attempt(url: str, prompt: list[int] | str, *, max_tokens: int = ANSWER_TOKENS, **options: Any) -> Attempt:
    """As :func:`ask`, and never raises for what a server or a connection may do."""
    start = time.monotonic()
    try:
        answer = ask(url, prompt, max_tokens=max_tokens, **options)
    except ServerError as error:
        seconds = time.monotonic() - start
        return Attempt(None, error.status, str(error), error.text, error.logprobs, seconds)
    except (OSError, HTTPException, ValueError) as error:
        return Attempt(None, 0, repr(error), "", (), time.monotonic() - start)
    return Attempt(answer, 200, "", answer.text, answer.logprobs, time.monotonic() - start)


def begin(
    pool: ThreadPoolExecutor, url: str, prompt: list[int] | str, *, max_tokens: int = ANSWER_TOKENS, **options: Any
) -> Future[Attempt]:
    """:func:`attempt` on a thread of ``pool``."""
    return pool.submit(attempt, url, prompt, max_tokens=max_tokens, **options)


def drop_device_copies(url: str) -> None:
    """Evict every page that no request holds from the device, so that the next hit must be restored."""
    post_json(url, "/v1/cache/reset", {"tier": "device"})
