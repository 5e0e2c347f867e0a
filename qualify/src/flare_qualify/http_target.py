"""Puts any OpenAI-compatible server on a local port under the phases that need no access to its processes or disks.

Cold against repeated prompts, a crowd, clients that leave, and requests of every bad kind. What a server does not offer
(log-probabilities, counts of cached tokens) is told as such and not held against it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from flare_qualify.client import Answer, ServerError, get_json
from flare_qualify.distance import total_variation
from flare_qualify.run_context import Context
from flare_qualify.verdict import Damage
from flare_qualify.workloads.hostile import hostile_requests, send
from flare_qualify.workloads.requests import ask, begin

__all__ = ["Finding", "HttpTarget", "describe_server"]

_NUM_PROMPTS = 4
_WORDS = (
    "cache",
    "keeps",
    "what",
    "every",
    "rank",
    "has",
    "seen",
    "and",
    "one",
    "that",
    "comes",
    "back",
    "finds",
    "it",
)
_UNKNOWN_VOCABULARY = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result; ``is_good`` is None for a fact that is neither good nor bad."""

    what: str
    is_good: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Server:
    """What the server says of itself: the model's name, and the longest prompt."""

    model: str
    max_len: int


def describe_server(url: str) -> Server:
    """Ask ``/v1/models``.

    Raises:
        OSError: no server. ServerError: it has no such route. KeyError, IndexError: no model in its answer.
    """
    first = get_json(url, "/v1/models", timeout=20.0)["data"][0]
    return Server(first["id"], int(first.get("max_model_len") or 4096))


@dataclass(slots=True)
class HttpTarget:
    """One server under test. ``tolerance``: largest total variation between repeated answers."""

    context: Context
    url: str
    server: Server
    prompt_words: int = 400
    tolerance: float = 0.0
    max_vocabulary: int = _UNKNOWN_VOCABULARY
    findings: list[Finding] = field(default_factory=list)
    cold: dict[str, Answer] = field(default_factory=dict)

    def run(self) -> list[Finding]:
        """All phases; what was found. Failures are in the context's history, too."""
        prompts = [self._prompt(number) for number in range(_NUM_PROMPTS)]
        self.repeat(prompts)
        self.crowd(prompts)
        self.leave(prompts)
        self.misbehave(prompts[0])
        return self.findings

    def _prompt(self, number: int) -> str:
        # New at every run, so that a server that has been asked before is cold again.
        tag = self.context.rng.randrange(1 << 30)
        words = [_WORDS[self.context.rng.randrange(len(_WORDS))] for _ in range(self.prompt_words)]
        return f"Note {tag}-{number}. " + " ".join(words)

    def _ask(self, prompt: str, **options: Any) -> Answer:
        self.context.answered()
        return ask(self.url, prompt, model=self.server.model, **options)

    def _find(self, what: str, is_good: bool | None, detail: str) -> None:
        if is_good is not None:
            self.context.check(is_good, f"{what}: {detail}")
        self.findings.append(Finding(what, is_good, detail))

    def repeat(self, prompts: Sequence[str]) -> None:
        """Every prompt cold, then twice more: the same text and log-probabilities, sooner."""
        try:
            self._ask("warm up", max_tokens=2)
        except ServerError as error:
            self._find("answers", False, str(error))
            return
        for prompt in prompts:
            self.cold[prompt] = self._ask(prompt)
        warm = {prompt: [self._ask(prompt) for _ in range(2)] for prompt in prompts}
        pairs = [(self.cold[prompt], answer) for prompt in prompts for answer in warm[prompt]]
        wrong = sum(one.text != other.text for one, other in pairs)
        self.context.damage(Damage.WRONG_TOKENS, wrong, f"{wrong} of {len(pairs)} repeated answers have another text")
        self._find("repeated answers have the same text", not wrong, f"{len(pairs) - wrong} of {len(pairs)}")
        if all(answer.logprobs for answer in self.cold.values()):
            worst = max(total_variation(one.logprobs, other.logprobs) for one, other in pairs)
            detail = f"largest total variation {worst:.3g}, allowed {self.tolerance:g}"
            self._find("and the same log-probabilities", worst <= self.tolerance, detail)
        else:
            self._find("log-probabilities", None, "not offered")
        self._find_cached([answer for answers in warm.values() for answer in answers])
        cold_seconds = statistics.median(answer.ttft_seconds for answer in self.cold.values())
        warm_seconds = statistics.median(answer.ttft_seconds for _, answer in pairs)
        detail = f"cold {cold_seconds:.3f} s, repeated {warm_seconds:.3f} s, ratio {cold_seconds / warm_seconds:.1f}"
        self._find("time to first token", None, detail)

    def _find_cached(self, warm: Sequence[Answer]) -> None:
        cached, total = sum(answer.total_cached for answer in warm), sum(answer.prompt_tokens for answer in warm)
        if not cached:
            self._find("cached tokens", None, "none reported")
            return
        for answer in warm:
            if answer.total_cached:
                tier = max(answer.cached_tokens, key=lambda name: answer.cached_tokens[name])
                self.context.restored(answer, tier=tier)
        within = all(answer.total_cached < answer.prompt_tokens for answer in warm)
        self._find("cached tokens are reported", within, f"{cached} of {total} prompt tokens")

    def crowd(self, prompts: Sequence[str]) -> None:
        """All prompts several times at once. Texts may differ where batches change bits: told, not judged."""
        if not self.cold:
            return
        order = [prompt for prompt in prompts for _ in range(4)]
        with ThreadPoolExecutor(8) as pool:
            asked = [begin(pool, self.url, prompt, model=self.server.model) for prompt in order]
            results = [future.result().answer for future in asked]
        self.context.answered(len(order))
        failed = [result for result in results if result is None]
        differing = sum(
            answer is not None and answer.text != self.cold[prompt].text
            for prompt, answer in zip(order, results, strict=True)
        )
        self._find("a crowd is answered", not failed, f"{len(order) - len(failed)} of {len(order)}")
        self._find("answers that differ in a crowd", None, f"{differing} of {len(order)}")

    def leave(self, prompts: Sequence[str]) -> None:
        """Clients that close their connection in the middle; the server goes on and answers as before."""
        for number in range(12):
            self._leave(prompts[number % len(prompts)] + f" {number}", 0.02 * number)
        self.context.answered(12)
        self._still_right("after clients that left", prompts[0])

    def _leave(self, prompt: str, seconds: float) -> None:
        body = {"model": self.server.model, "prompt": prompt, "max_tokens": 200, "stream": True}
        data = json.dumps(body).encode()
        parts = urlsplit(self.url)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=30) as connection,
        ):
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(seconds)

    def _still_right(self, when: str, prompt: str) -> bool:
        try:
            answer = self._ask(prompt)
        except (ServerError, OSError) as error:
            self._find(f"answers {when}", False, str(error))
            return False
        is_same = not self.cold or answer.text == self.cold[prompt].text
        self._find(f"answers {when}", is_same, "as before" if is_same else f"{answer.text!r}")
        return is_same

    def misbehave(self, prompt: str) -> None:
        """The hostile requests; the server must be there after each, and say what is wrong with a status under 500."""
        requests = list(hostile_requests(vocab_size=self.max_vocabulary, max_len=self.server.max_len))
        errors: list[str] = []
        for request in requests:
            try:
                status = send(self.url, request)
            except OSError as error:
                dead = not self._is_there()
                self.context.damage(Damage.DEATHS_BY_REQUEST, dead, f"{request.name}: {error!r}")
                errors.append(f"{request.name} ({error.__class__.__name__})")
                if dead:
                    break
                continue
            if status >= 500:
                errors.append(f"{request.name} ({status})")
        self.context.answered(len(requests))
        self.context.fault_fired("hostile requests", f"{len(requests)} sent to {self.url}")
        detail = f"{len(requests)} sent" + (f"; {', '.join(errors[:12])}" if errors else "")
        self._find("bad requests are refused by the client's fault", not errors, detail)
        self._still_right("after bad requests", prompt)

    def _is_there(self) -> bool:
        try:
            describe_server(self.url)
        except (OSError, ServerError):
            return False
        return True
