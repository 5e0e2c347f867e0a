"""The runner's way to choose tokens on vocabulary shards: nothing of the vocabulary's size travels between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flare_core.compute.sampling_state import SampleRow
from flare_core.compute.sharded_model import ShardedModel
from flare_spec.verification.coupled import choose_on_shards
from flare_spec.verification.rows import DraftBatch, row_table
from flare_spec.verification.shard import open_shard

__all__ = ["ShardChooser"]


@dataclass(frozen=True, slots=True)
class ShardChooser:
    """A :class:`flare_core.compute.runner.TokenChooser` for one rank of ``model``."""

    model: ShardedModel

    def __call__(
        self, local_logits: torch.Tensor, sequences: Sequence[SampleRow], drafts: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """See the port: what :func:`flare_core.compute.sampler.choose_tokens` gives on gathered rows."""
        model, device = self.model, local_logits.device
        table_of = torch.zeros((len(drafts), max(map(len, drafts), default=0)), dtype=torch.int64)
        for row, tokens in zip(table_of, drafts, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        batch = DraftBatch(sequences, [len(tokens) for tokens in drafts], table_of.to(device))
        vocab_size = model.config.vocab_size
        table = row_table(batch, vocab_size)
        shard = open_shard(local_logits, batch, table, model.shard.vocab, vocab_size)
        return choose_on_shards(shard, table, model.collectives)
