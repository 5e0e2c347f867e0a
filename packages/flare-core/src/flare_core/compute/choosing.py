"""How a step's tokens are chosen from logits: the port, and the plain way, which gathers whole rows on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flare_core.compute.sampled_rows import SampledRows
from flare_core.compute.sampler import choose_tokens
from flare_core.compute.sampling_state import SampleRow, SlotSampling
from flare_core.compute.sharded_model import ShardedModel

__all__ = ["Chosen", "GatheredRows", "TokenChooser"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen, equal on every rank.

    Attributes:
        tokens: int64 [rows], the token behind each row, on the device.
        num_accepted: drafts kept of each run; None: those that are the tokens chosen behind the rows before them.
    """

    tokens: torch.Tensor
    num_accepted: Sequence[int] | None = None


class TokenChooser(Protocol):
    """Chooses tokens from each rank's own logits. Every rank calls it for every step; blocks for the others."""

    def __call__(
        self,
        local_logits: torch.Tensor,
        sampled: Sequence[SampledRows],
        states: Sequence[SlotSampling],
        gathered: torch.Tensor | None,
    ) -> Chosen:
        """``local_logits`` [rows, ids of this rank] float32: the rows of ``sampled``, in order; ``states``: each run's;
        ``gathered`` [rows, vocabulary]: where a step has gathered them anyway. Logits may be changed."""
        ...


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """A :class:`TokenChooser`: one collective of whole rows, none at world size 1."""

    model: ShardedModel

    def __call__(
        self,
        local_logits: torch.Tensor,
        sampled: Sequence[SampledRows],
        states: Sequence[SlotSampling],
        gathered: torch.Tensor | None,
    ) -> Chosen:
        """See the port."""
        # The token being decided stands behind the one that was computed.
        rows = [
            SampleRow(state, position + 1, each.drafts[:index])
            for state, each in zip(states, sampled, strict=True)
            for index, position in enumerate(each.positions)
        ]
        logits = self.model.gather_logits(local_logits) if gathered is None else gathered
        return Chosen(choose_tokens(logits, rows))
