"""The benchmark's prompt: one long run of token ids, whose page ``i`` is page ``i`` of every rank's memory.

Knows what the scheduler would ask of the prefix store; asks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from flare_cli.bench_cache.settings import PAGE_TOKENS, GroupSettings, set_identity
from flare_core.keys import TokenIds, chain_keys, root_key, token_array
from flare_core.prefix import PrefixQuery, StoreRequest

__all__ = ["Prompt"]

_NUM_TOKEN_IDS = 1 << 17


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of whole pages, and their keys."""

    root: bytes
    token_ids: TokenIds
    keys: tuple[bytes, ...]

    @classmethod
    def make(cls, settings: GroupSettings) -> Self:
        """The prompt that fills the pages of a group."""
        root = root_key(set_identity(settings).fingerprint(), b"")
        rng = np.random.default_rng(settings.seed)
        token_ids = token_array(rng.integers(0, _NUM_TOKEN_IDS, settings.num_pages * PAGE_TOKENS))
        return cls(root, token_ids, tuple(chain_keys(root, token_ids, PAGE_TOKENS)))

    def request(self) -> StoreRequest:
        """Store all of it."""
        return StoreRequest(
            root=self.root,
            token_ids=self.token_ids,
            keys=self.keys,
            pages=range(len(self.keys)),
            tail_page=None,
            row_slot=None,
            after_step=0,
        )

    def query(self, *, first_page: int = 0, end_page: int | None = None) -> PrefixQuery:
        """The prompt up to ``end_page``, of which the device has what lies before ``first_page``."""
        end = len(self.keys) if end_page is None else end_page
        return PrefixQuery(
            root=self.root,
            token_ids=self.token_ids[: end * PAGE_TOKENS],
            keys=self.keys[:end],
            num_device_pages=first_page,
            num_device_tokens=first_page * PAGE_TOKENS,
        )
