"""What everything should be: tokens of each request, bytes of each record's sections on each rank.

Learns prompts and stores as they are asked for; knows no machine's state, so that a wrong one cannot convince it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flare_cache.jobs import RecordIdentity
from flare_qualify.sim.model import Model, Words

__all__ = ["Boundary", "Oracle", "Stream"]


@dataclass(slots=True)
class Stream:
    """One request: what was asked for, and what came of it.

    Attributes:
        known: prompt and tokens so far, u32 little endian.
        num_tokens: output tokens so far.
        is_over: it ended, or its process did.
        cached: prompt tokens that were not computed, once it has finished; restored: from memory or disk.
    """

    request_id: str
    salt: int
    known: bytes
    num_prompt_tokens: int
    num_tokens: int = 0
    is_over: bool = False
    reason: str = ""
    cached: int = 0
    restored: int = 0


@dataclass(frozen=True, slots=True)
class Boundary:
    """A prefix that ends with a page: tokens in it, its word, and the sum of the words of all its prefixes."""

    position: int
    digest: int
    total: int


@dataclass(slots=True)
class Oracle:
    """The reference."""

    model: Model
    salts: dict[bytes, int] = field(default_factory=dict)
    boundaries: dict[bytes, Boundary] = field(default_factory=dict)
    tokens: dict[tuple[bytes, int], bytes] = field(default_factory=dict)

    def expected_token(self, stream: Stream) -> int:
        """The next token of ``stream``."""
        digests = self.model.digests(stream.known, stream.salt)
        return self.model.expected_token(digests, len(digests))

    def learn_root(self, root: bytes, salt: int) -> None:
        """Prompts under this root key begin with ``salt``."""
        self.boundaries[root] = Boundary(0, salt, 0)
        self.salts[root] = salt

    def learn(self, root: bytes, token_ids: bytes, keys: Sequence[bytes]) -> None:
        """A prefix with these page keys is offered to the store: from now on its boundaries are known."""
        if not keys or keys[-1] in self.boundaries:
            return
        digests = self.model.digests(token_ids, self.salts[root])
        totals = np.cumsum(digests, dtype=np.uint64)
        size = self.model.page_tokens
        for at, key in enumerate(keys):
            last = (at + 1) * size - 1
            self.boundaries[key] = Boundary(last + 1, int(digests[last]), int(totals[last]))

    def learn_record(self, identity: RecordIdentity, token_ids: bytes) -> None:
        """A record of these tokens is stored."""
        self.tokens[identity.key, identity.start] = token_ids

    def sections(self, identity: RecordIdentity, rank: int) -> list[bytes] | None:
        """What each section of a record begins with on ``rank``; the rest of its page is zero. None: unknown."""
        words = self._words(identity)
        if words is None:
            return None
        size = self.model.page_tokens
        return [self.model.entries(words[at : at + size], rank) for at in range(0, len(words), size)]

    def row(self, identity: RecordIdentity, rank: int) -> bytes | None:
        """The row at the record's end on ``rank``. None: unknown."""
        words, start = self._words(identity), self.boundaries.get(identity.start_key)
        if words is None or start is None:
            return None
        return self.model.row_of(start.total + int(words.sum(dtype=np.uint64)), rank)

    def _words(self, identity: RecordIdentity) -> Words | None:
        tokens, start = self.tokens.get((identity.key, identity.start)), self.boundaries.get(identity.start_key)
        if tokens is None or start is None:
            return None
        return self.model.digests_from(tokens, start.position, start.digest)
