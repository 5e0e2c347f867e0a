"""The drafter that a configuration names. Loads no torch but what a drafter with weights needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from flare_core.ports import Drafter
from flare_spec.config import SpeculativeConfig
from flare_spec.lookup import LookupDrafter
from flare_spec.suffix import SuffixDrafter

if TYPE_CHECKING:
    from flare_core.compute.choosing import TokenChooser
    from flare_core.compute.sharded_model import ShardedModel
    from flare_spec.dspark.drafter import BlockDrafter
    from flare_spec.verification.choosing import ProposingDrafter

__all__ = ["PACKAGED_DRAFT", "make_chooser", "make_drafter"]

PACKAGED_DRAFT = Path(__file__).with_name("drafters_data") / "smollm2-135m-instruct"
"""A DSpark drafter for SmolLM2-135M-Instruct; how it was made says ``docs/speculation.md``."""

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


def make_chooser(config: SpeculativeConfig | None, target: ShardedModel, drafter: Drafter | None) -> TokenChooser:
    """How tokens are chosen, with ``drafter``, which was made from ``config``, or without one."""
    from flare_spec.verification.choosing import RatioChooser, coupled_chooser

    if config is None or config.rejection_sample_method == "coupled":
        return coupled_chooser(target, drafter)
    proposes = config.method in {"dspark", "dflash"}
    return RatioChooser(target, cast("ProposingDrafter", drafter) if proposes else None)


def _block_drafter(config: SpeculativeConfig, target: ShardedModel) -> BlockDrafter:
    from flare_core.compute.philox import STREAM_DRAFT, STREAM_SAMPLE
    from flare_spec.dspark.config import drafted_tokens
    from flare_spec.dspark.drafter import BlockDrafter
    from flare_spec.dspark.weights import load_block_draft

    weights = target.embedding
    directory = PACKAGED_DRAFT if config.model is None else Path(config.model)
    draft = load_block_draft(directory, target.config, dtype=weights.dtype, device=weights.device)
    num_drafts = drafted_tokens(draft.config, config.num_speculative_tokens)
    stream = STREAM_SAMPLE if config.rejection_sample_method == "coupled" else STREAM_DRAFT
    return BlockDrafter(draft, target, num_drafts, stream=stream, threshold=config.confidence_threshold)
