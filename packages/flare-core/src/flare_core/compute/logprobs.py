"""Log-probabilities of the raw distribution, with ranks and the most likely alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flare_core.plan import TokenLogprobs
from flare_core.sampling import MAX_LOGPROBS

__all__ = ["LEAST_LOGPROB", "RawLogprobs", "raw_logprobs"]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-probabilities of R rows on the device.

    Attributes:
        token_ids: int64 [R], the tokens asked for.
        values: float32 [R], theirs.
        ranks: int64 [R], 1 + number of ids that are more likely.
        top_values, top_ids: [R, 20] the best, greatest first, equals by lowest id.
    """

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor

    def reordered(self, where: torch.Tensor) -> RawLogprobs:
        """Rows ``where`` [R]."""
        return RawLogprobs(
            self.token_ids[where], self.values[where], self.ranks[where], self.top_values[where], self.top_ids[where]
        )

    def entries(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """On the host, row r with ``num_top[r]`` alternatives. Blocks for the device."""
        ids, values, ranks = self.token_ids.tolist(), self.values.tolist(), self.ranks.tolist()
        top = zip(self.top_ids.tolist(), self.top_values.tolist(), strict=True)
        return [
            TokenLogprobs(
                ids[row], values[row], ranks[row], tuple(zip(top_ids[:count], top_values[:count], strict=True))
            )
            for row, (count, (top_ids, top_values)) in enumerate(zip(num_top, top, strict=True))
        ]


def raw_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> RawLogprobs:
    """Log-softmax of ``logits`` [R, vocabulary] float32 without NaN, looked up at ``token_ids`` [R]."""
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(nan=LEAST_LOGPROB).clamp_(min=LEAST_LOGPROB)
    values = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > values).sum(dim=-1) + 1
    width = min(MAX_LOGPROBS, logits.shape[1])
    top = torch.topk(logprobs, width, dim=-1)
    # topk orders equals as it likes: order by id first, then, stably, by value.
    by_id = top.indices.sort(dim=-1)
    by_value = top.values.gather(1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    return RawLogprobs(token_ids, values.squeeze(1), ranks, by_value.values, by_id.values.gather(1, by_value.indices))
