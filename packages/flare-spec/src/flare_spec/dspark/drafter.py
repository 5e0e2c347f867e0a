"""The block drafter as the runner's drafter: contexts by slot, one block for all sequences that are drafted for.

On several ranks each computes the whole drafter and its own part of the target's vocabulary; one message a block brings
the best candidates of every rank to all, and from there on all compute the same. For coupled verification drafts are
drawn with the noise that the target's tokens are drawn with, which is what lets them be the same; for rejection
sampling with noise of their own, and what they were drawn from is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flare_core.compute.philox import STREAM_SAMPLE
from flare_core.compute.sharded_model import ShardedModel
from flare_core.keys import TokenIds
from flare_core.sampling import SamplingParams
from flare_spec.dspark.block_sampling import top_candidates
from flare_spec.dspark.context import ContextStore
from flare_spec.dspark.draft import DraftNoise, draft_block
from flare_spec.dspark.scheduling import static_length
from flare_spec.dspark.weights import BlockDraft
from flare_spec.verification.proposals import Candidates

__all__ = ["BlockDrafter"]

_NUM_CANDIDATES = 32
"""Of each rank and slot. Chosen by base logits, before anything of the block is drawn."""


@dataclass(slots=True)
class _Slot:
    """One sequence; ``context`` ends where its last token stands, or is None until something of it was computed."""

    params: SamplingParams
    last_token: int
    context: ContextStore | None = None


@dataclass(slots=True)
class BlockDrafter:
    """A :class:`flare_core.ports.Drafter`.

    Attributes:
        draft: the drafter, whole on every rank.
        target: the rank's part of the model; its embedding and head are the drafter's.
        max_drafts: see the port; no more than the drafter was trained for.
        stream: of the noise.
        threshold: drafts end before the first whose confidence is lower; 0: none does.
    """

    draft: BlockDraft
    target: ShardedModel
    max_drafts: int
    stream: int = STREAM_SAMPLE
    threshold: float = 0.0
    _drawn: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _slots: dict[int, _Slot] = field(default_factory=dict)

    @property
    def taps(self) -> Sequence[int]:
        """See the port."""
        return self.draft.config.taps

    def start(self, slot: int, token_ids: TokenIds, params: SamplingParams) -> None:
        """See the port."""
        self._slots[slot] = _Slot(params, int(token_ids[-1]))

    @torch.inference_mode()
    def observe(self, slot: int, start: int, rows: torch.Tensor) -> None:
        """See the port. What lies before a gap is given up: a context has no holes."""
        state, backbone = self._slots[slot], self.draft.backbone
        if state.context is None or state.context.stop != start:
            state.context = backbone.new_context(first=start)
        backbone.extend(state.context, backbone.context_rows(rows.to(backbone.fuse.weight.dtype)))

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """See the port."""
        self._slots[slot].last_token = token_ids[-1]

    @torch.inference_mode()
    def propose(self, slots: Sequence[int], max_tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """See the port: one pass for all of them."""
        states = [self._slots[slot] for slot in slots]
        known = [(at, state, state.context) for at, state in enumerate(states) if state.context is not None]
        proposed: list[Sequence[int]] = [()] * len(slots)
        if not known:
            return proposed
        device = self.target.embedding.device
        drafted = draft_block(
            self.draft,
            [context for _, _, context in known],
            torch.tensor([state.last_token for _, state, _ in known], device=device),
            num_tokens=min(self.max_drafts, max(max_tokens[at] for at, _, _ in known)),
            noise=DraftNoise(
                torch.tensor([state.params.temperature for _, state, _ in known], dtype=torch.float32, device=device),
                torch.tensor([_signed(state.params.seed) for _, state, _ in known], device=device),
                stream=self.stream,
            ),
            embed=self._embed,
            base_scores=self._base_scores,
        )
        tokens = drafted.sampled.tokens.tolist()
        sure = None if drafted.confidences is None else drafted.confidences.tolist()
        self._drawn = {}
        for row, (at, _, _) in enumerate(known):
            assert drafted.ids is not None  # noqa: S101 - candidates have ids
            self._drawn[slots[at]] = (drafted.ids[row], drafted.sampled.scores[row])
            count = max_tokens[at] if sure is None else min(max_tokens[at], static_length(sure[row], self.threshold))
            proposed[at] = tokens[row][:count]
        return proposed

    def proposal(self, slots: Sequence[int]) -> Candidates:
        """Candidates [slots, drafts, C] that the drafts of the last call were drawn from; zeros for other slots."""
        ids, scores = next(iter(self._drawn.values()))
        nothing = (torch.zeros_like(ids), torch.zeros_like(scores))
        drawn = [self._drawn.get(slot, nothing) for slot in slots]
        return Candidates(torch.stack([each[0] for each in drawn]), torch.stack([each[1] for each in drawn]))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.target.embed(token_ids).to(self.draft.backbone.fuse.weight.dtype)

    def _base_scores(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates of all ranks [B, gamma, ranks * candidates]: bfloat16 logits, and ids."""
        target = self.target
        local = target.head_logits(rows.flatten(0, 1).to(target.embedding.dtype)).to(torch.bfloat16)
        local = local.view(*rows.shape[:2], len(target.shard.vocab))
        values, ids = local, torch.zeros_like(local, dtype=torch.int64)
        if local.shape[-1]:
            values, ids = top_candidates(local, _NUM_CANDIDATES, first_id=target.shard.vocab.start)
        if target.shard.world_size == 1:
            return values, ids
        # One message: values are exact in float32, and so are ids, whose bits travel in one.
        message = torch.stack([values.float(), ids.to(torch.int32).view(torch.float32)])
        missing = _NUM_CANDIDATES - values.shape[-1]
        if missing:
            message = torch.nn.functional.pad(message, (0, missing))
            message[0, ..., -missing:] = -torch.inf
        gathered = target.collectives.all_gather(message)
        merged = gathered.permute(1, 2, 3, 0, 4).flatten(3)
        return merged[0].to(torch.bfloat16), merged[1].contiguous().view(torch.int32).to(torch.int64)


def _signed(seed: int) -> int:
    """The 64 bits of ``seed`` as two's complement, which is what an int64 tensor holds."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
