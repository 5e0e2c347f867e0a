"""The runner's ways to choose tokens on vocabulary shards: nothing of the vocabulary's size travels between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flare_core.compute.choosing import Chosen, GatheredRows, TokenChooser
from flare_core.compute.sampled_rows import SampledRows
from flare_core.compute.sampling_state import SampleRow, SlotSampling
from flare_core.compute.sharded_model import ShardedModel
from flare_core.ports import Drafter
from flare_spec.verification.coupled import choose_on_shards
from flare_spec.verification.proposals import OneHot, Proposal
from flare_spec.verification.ratio import verify_ratio
from flare_spec.verification.rows import DraftBatch, row_table
from flare_spec.verification.shard import open_shard

__all__ = ["ProposingDrafter", "RatioChooser", "ShardChooser", "coupled_chooser"]


class ProposingDrafter(Protocol):
    """A drafter that draws its drafts by chance, and tells from what."""

    def proposal(self, slots: Sequence[int]) -> Proposal:
        """What the drafts of these slots, the last it was asked for, were drawn from; anything for slots without."""
        ...


def coupled_chooser(model: ShardedModel, drafter: Drafter | None) -> TokenChooser:
    """Equal texts with and without drafts, whatever ``drafter`` is: on shards where there are several."""
    del drafter
    return GatheredRows(model) if model.shard.world_size == 1 else ShardChooser(model)


@dataclass(frozen=True, slots=True)
class ShardChooser:
    """A :class:`flare_core.compute.choosing.TokenChooser`: the tokens that ``GatheredRows`` gives, row by row."""

    model: ShardedModel

    def __call__(
        self,
        local_logits: torch.Tensor,
        sampled: Sequence[SampledRows],
        states: Sequence[SlotSampling],
        gathered: torch.Tensor | None,
    ) -> Chosen:
        """See the port. One collective for rows without filters, none where rows are gathered anyway."""
        if gathered is not None:
            return GatheredRows(self.model)(local_logits, sampled, states, gathered)
        vocab_size = self.model.config.vocab_size
        batch = _batch(sampled, states, local_logits.device)
        table = row_table(batch, vocab_size)
        shard = open_shard(local_logits, batch, table, self.model.shard.vocab, vocab_size)
        return Chosen(choose_on_shards(shard, table, self.model.collectives))


@dataclass(frozen=True, slots=True)
class RatioChooser:
    """A :class:`flare_core.compute.choosing.TokenChooser`: drafts are kept by rejection sampling.

    Attributes:
        proposing: the drafter, where it draws by chance; None where what it proposes is all that it would.
    """

    model: ShardedModel
    proposing: ProposingDrafter | None

    def __call__(
        self,
        local_logits: torch.Tensor,
        sampled: Sequence[SampledRows],
        states: Sequence[SlotSampling],
        gathered: torch.Tensor | None,
    ) -> Chosen:
        """See the port. Two collectives for rows without filters."""
        del gathered
        batch = _batch(sampled, states, local_logits.device)
        proposal: Proposal = OneHot()
        if self.proposing is not None and any(batch.num_drafts):
            proposal = self.proposing.proposal([each.run.slot for each in sampled])
        verified = verify_ratio(
            local_logits,
            batch,
            proposal,
            self.model.collectives,
            span=self.model.shard.vocab,
            vocab_size=self.model.config.vocab_size,
        )
        num_accepted: list[int] = verified.num_accepted.tolist()
        ends = torch.tensor([1 + len(each.drafts) for each in sampled]).cumsum(0)
        firsts = (ends - torch.tensor([1 + len(each.drafts) for each in sampled])).to(local_logits.device)
        # Behind each row its draft, and behind the last that is kept the token that verification gave.
        tokens = torch.tensor([token for each in sampled for token in (*each.drafts, 0)], device=local_logits.device)
        tokens[firsts + verified.num_accepted] = verified.next_token
        return Chosen(tokens, num_accepted)


def _batch(sampled: Sequence[SampledRows], states: Sequence[SlotSampling], device: torch.device) -> DraftBatch:
    drafts = torch.zeros((len(sampled), max(len(each.drafts) for each in sampled)), dtype=torch.int64)
    for row, each in zip(drafts, sampled, strict=True):
        row[: len(each.drafts)] = torch.tensor(each.drafts, dtype=torch.int64)
    firsts = [SampleRow(state, each.run.start + 1) for state, each in zip(states, sampled, strict=True)]
    return DraftBatch(firsts, [len(each.drafts) for each in sampled], drafts.to(device))
