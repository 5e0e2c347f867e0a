"""The drafter that a configuration names. Loads no torch but what a drafter with weights needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flare_core.ports import Drafter
from flare_spec.config import SpeculativeConfig
from flare_spec.lookup import LookupDrafter
from flare_spec.suffix import SuffixDrafter

if TYPE_CHECKING:
    from flare_core.compute.sharded_model import ShardedModel
    from flare_spec.dspark.drafter import BlockDrafter

__all__ = ["make_drafter"]

_DEFAULT_DRAFTS = 5


def make_drafter(config: SpeculativeConfig, target: ShardedModel) -> Drafter:
    """A new one for ``target``. Blocks for reading weights, where it has some.

    Raises:
        CheckpointError, UnsupportedModel, UsageError: its checkpoint is none, or was made for something else.
    """
    num_drafts = config.num_speculative_tokens or _DEFAULT_DRAFTS
    match config.method:
        case "ngram":
            return LookupDrafter(num_drafts, longest=config.prompt_lookup_max, shortest=config.prompt_lookup_min)
        case "suffix":
            return SuffixDrafter(
                num_drafts,
                longest=config.suffix_decoding_max_tree_depth,
                max_requests=config.suffix_decoding_max_cached_requests,
                drafts_per_match=config.suffix_decoding_max_spec_factor,
                least_chance=config.suffix_decoding_min_token_prob,
            )
        case "dspark" | "dflash":
            return _block_drafter(config, target)


def _block_drafter(config: SpeculativeConfig, target: ShardedModel) -> BlockDrafter:
    from flare_spec.dspark.config import drafted_tokens
    from flare_spec.dspark.drafter import BlockDrafter
    from flare_spec.dspark.weights import load_block_draft

    weights = target.embedding
    draft = load_block_draft(Path(config.model or ""), target.config, dtype=weights.dtype, device=weights.device)
    num_drafts = drafted_tokens(draft.config, config.num_speculative_tokens)
    return BlockDrafter(draft, target, num_drafts, threshold=config.confidence_threshold)
