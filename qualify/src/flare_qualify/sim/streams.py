"""The requests of a world: each token is held against the reference as it comes, and each ends once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flare_core.engine.request import EngineEvent, Failed, Finished, FinishReason, Tokens
from flare_core.prefix import Tier
from flare_qualify.sim.loop import Violation
from flare_qualify.sim.oracle import Oracle, Stream

__all__ = ["Streams"]


@dataclass(slots=True)
class Streams:
    """See the module; ``counts`` is what happened, for the summary."""

    oracle: Oracle
    counts: Counter[str]
    by_id: dict[str, Stream] = field(default_factory=dict)

    def running(self) -> Iterator[Stream]:
        """Those that have not ended."""
        return (stream for stream in self.by_id.values() if not stream.is_over)

    def end_all(self) -> None:
        """Their process is gone."""
        for stream in self.running():
            stream.is_over = True

    def emitted(self, events: Sequence[EngineEvent], *, is_poisoned: bool) -> None:
        """The engine tells of requests; ``is_poisoned``: it has been told to stop."""
        for event in events:
            match event:
                case Tokens(request_id=request_id, token_ids=token_ids):
                    if is_poisoned:
                        raise Violation("after poison", f"{request_id} gets tokens")
                    for token in token_ids:
                        self._check_token(self._open(request_id), token)
                case Finished():
                    self._finished(event)
                case Failed(request_id=request_id, status=status, code=code):
                    stream = self._open(request_id)
                    stream.is_over, stream.reason = True, f"failed {status}"
                    self.counts[f"failed requests {code or status}"] += 1
                case _:
                    pass

    def _finished(self, event: Finished) -> None:
        stream = self._open(event.request_id)
        cached = event.usage.cached_tokens
        stream.is_over, stream.reason = True, str(event.reason)
        stream.cached = sum(cached.values())
        stream.restored = stream.cached - cached.get(Tier.DEVICE, 0)
        self.counts[f"finished {event.reason}"] += 1
        self.counts["restored tokens"] += stream.restored
        if event.reason is FinishReason.LENGTH and not stream.num_tokens:
            raise Violation("tokens", f"{event.request_id} ended without any")

    def _open(self, request_id: str) -> Stream:
        stream = self.by_id[request_id]
        if stream.is_over:
            raise Violation("tokens", f"{request_id}: an event comes after its end")
        return stream

    def _check_token(self, stream: Stream, token: int) -> None:
        expected = self.oracle.expected_token(stream)
        if token != expected:
            raise Violation(
                "wrong token", f"{stream.request_id}: token {stream.num_tokens} is {token} instead of {expected}"
            )
        stream.known += token.to_bytes(4, "little")
        stream.num_tokens += 1
        self.counts["tokens"] += 1
