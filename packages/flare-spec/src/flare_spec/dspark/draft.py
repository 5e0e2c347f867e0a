"""Drafts one block for each sequence: backbone, the target's head, the Markov walk and the confidences.

The embedding and the head belong to the target and come as functions; nothing here knows ranks, pages or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flare_core.compute.philox import STREAM_DRAFT
from flare_spec.dspark.block_sampling import MarkovBlock, markov_sample_block
from flare_spec.dspark.confidence import confidences
from flare_spec.dspark.context import ContextStore
from flare_spec.dspark.weights import BlockDraft
from flare_spec.kernels.markov import has_markov_walk, markov_sample_block_cuda

__all__ = ["BaseScores", "DraftNoise", "DraftedBlock", "draft_block"]

BaseScores = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Of normed rows [B, gamma, hidden]: base logits [B, gamma, N] bfloat16, and their ids [B, gamma, N] or None (all)."""


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """How each of B sequences samples: temperatures [B] float32 (0 is greedy), seeds [B] int64, the noise's stream."""

    temperatures: torch.Tensor
    seeds: torch.Tensor
    stream: int = STREAM_DRAFT


@dataclass(frozen=True, slots=True)
class DraftedBlock:
    """What was drafted.

    Attributes:
        sampled: tokens, scores and features, [B, gamma, ...].
        ids: token ids of the scores' columns, [B, gamma, N] int64, or None where column n is id n.
        confidences: [B, gamma] float32, or None without a confidence head.
    """

    sampled: MarkovBlock
    ids: torch.Tensor | None
    confidences: torch.Tensor | None


def draft_block(
    draft: BlockDraft,
    contexts: Sequence[ContextStore],
    anchors: torch.Tensor,
    *,
    num_tokens: int,
    noise: DraftNoise,
    embed: Callable[[torch.Tensor], torch.Tensor],
    base_scores: BaseScores,
) -> DraftedBlock:
    """Draft after ``anchors`` [B] int64, each the token at its context's ``stop``; contexts are left as they were.

    ``num_tokens`` are drafted, gamma at most (:func:`flare_spec.dspark.config.drafted_tokens`): the first of a whole
    block, so that they are what the block's would be; the head is applied to their rows only.
    ``embed`` gives rows [M, hidden] of ids [M] from the target's embedding.
    """
    ids = draft.backbone.block_ids(anchors)
    embedded = embed(ids.flatten()).view(*ids.shape, -1)
    hidden = draft.backbone.hidden(embedded, contexts)[:, :num_tokens]
    base, columns = base_scores(hidden)
    first = torch.tensor([store.stop + 1 for store in contexts], device=anchors.device)
    sampled = _sample(draft, base, columns, hidden=hidden, anchors=anchors, first=first, noise=noise)
    head = draft.confidence
    values = None if head is None else confidences(head, hidden, sampled.features)
    return DraftedBlock(sampled, columns, values)


def _sample(
    draft: BlockDraft,
    base: torch.Tensor,
    columns: torch.Tensor | None,
    *,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    first: torch.Tensor,
    noise: DraftNoise,
) -> MarkovBlock:
    """The walk over the block, by the kernel where it takes these shapes; arguments as in :func:`draft_block`."""
    if columns is not None and draft.markov is not None and has_markov_walk(base, columns, draft.markov):
        return markov_sample_block_cuda(
            base,
            columns,
            draft.markov,
            anchors=anchors,
            temperatures=noise.temperatures,
            seeds=noise.seeds,
            positions=first,
            stream=noise.stream,
        )
    return markov_sample_block(
        base,
        columns,
        draft.markov,
        hidden=hidden,
        anchors=anchors,
        temperatures=noise.temperatures,
        seeds=noise.seeds,
        positions=first,
        stream=noise.stream,
    )
