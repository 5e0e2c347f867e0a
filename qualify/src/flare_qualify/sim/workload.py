"""The requests of a world: prompts that share prefixes of a few documents, for two tenants."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from flare_core.engine.request import AddRequest, EngineRequest
from flare_core.keys import root_key
from flare_core.sampling import SamplingParams
from flare_qualify.sim.options import Options
from flare_qualify.sim.oracle import Oracle, Stream

__all__ = ["Workload"]

_TENANTS = {b"": 0x5EED, b"other tenant": 0x7E4A}


@dataclass(slots=True)
class Workload:
    """Makes requests, and tells the oracle of them."""

    options: Options
    rng: Random
    oracle: Oracle
    streams: dict[str, Stream]
    vocab_size: int
    documents: list[bytes] = field(default_factory=list)
    _num_made: int = 0

    def prepare(self, set_fingerprint: bytes) -> None:
        """Draw the documents."""
        for salt, word in _TENANTS.items():
            self.oracle.learn_root(root_key(set_fingerprint, salt), word)
        length = self.options.document_pages * self.options.page_tokens
        self.documents = [self._tokens(length) for _ in range(self.options.num_documents)]

    def _tokens(self, count: int) -> bytes:
        return b"".join(self.rng.randrange(self.vocab_size).to_bytes(4, "little") for _ in range(count))

    def request(self) -> AddRequest:
        """One more, like those before it."""
        rng = self.rng
        document = rng.choice(self.documents)
        length = len(document) // 4
        shared = length if rng.random() < 0.4 else rng.randint(1, length)
        prompt = document[: 4 * shared]
        if rng.random() < 0.6:
            prompt += self._tokens(rng.randint(1, self.options.page_tokens + 1))
        salt = b"other tenant" if rng.random() < 0.15 else b""
        return self.add(prompt, salt, rng.randint(1, self.options.max_tokens))

    def probe(self, prompt: bytes | None = None) -> tuple[AddRequest, bytes]:
        """A prompt that nobody has sent, or the same once more."""
        if prompt is None:
            room = self.options.num_pages * self.options.page_tokens - 3
            prompt = self._tokens(min(3 * self.options.page_tokens, room))
        return self.add(prompt, b"", 2), prompt

    def add(self, prompt: bytes, salt: bytes, max_tokens: int) -> AddRequest:
        """The command for a request, and its stream."""
        self._num_made += 1
        request_id = f"q{self._num_made}"
        word = _TENANTS[salt]
        self.streams[request_id] = Stream(request_id, word, prompt, len(prompt) // 4)
        params = SamplingParams(max_tokens=max_tokens, seed=word)
        return AddRequest(EngineRequest(request_id=request_id, token_ids=prompt, params=params, salt=salt))
