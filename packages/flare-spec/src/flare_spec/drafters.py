"""The drafter that a configuration names. Loads no torch."""

from __future__ import annotations

from flare_core.ports import Drafter
from flare_spec.config import SpeculativeConfig
from flare_spec.lookup import LookupDrafter
from flare_spec.suffix import SuffixDrafter

__all__ = ["make_drafter"]


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """A new one."""
    match config.method:
        case "ngram":
            return LookupDrafter(longest=config.prompt_lookup_max, shortest=config.prompt_lookup_min)
        case "suffix":
            return SuffixDrafter(
                longest=config.suffix_decoding_max_tree_depth,
                max_requests=config.suffix_decoding_max_cached_requests,
                drafts_per_match=config.suffix_decoding_max_spec_factor,
                least_chance=config.suffix_decoding_min_token_prob,
            )
