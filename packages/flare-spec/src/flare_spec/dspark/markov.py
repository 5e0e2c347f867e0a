"""The Markov head: from the previous token (and, for two kinds, the slot's row) to a low-rank bias on the logits.

Knows its three kinds and their arithmetic; not logits, sampling or blocks. Source: DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_core.compute.layers import Projection
from flare_spec.dspark.config import MarkovKind

__all__ = ["MarkovHead", "MarkovStep"]


@dataclass(frozen=True, slots=True)
class MarkovStep:
    """One slot's step for B sequences.

    Attributes:
        embedding: w1 of the previous token, [B, rank], in the dtype of w1; the confidence head reads it.
        operand: what w2 is multiplied by, [B, rank] float32, of bfloat16 values.
        state: [B, rank] float32, carried to the next slot by the recurrent kind; unchanged by the others.
    """

    embedding: torch.Tensor
    operand: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """Weights of a Markov head.

    Attributes:
        w1, w2: [vocabulary, rank], bfloat16 values in any float dtype; a row belongs to a token id.
        mixer: gated: [rank, hidden + rank]; recurrent: [3 * rank, 2 * rank + hidden]; float32 with bias. None: vanilla.
    """

    kind: MarkovKind
    w1: torch.Tensor
    w2: torch.Tensor
    mixer: Projection | None

    def first_state(self, batch: int) -> torch.Tensor:
        """The state before the first slot of a block: zeros [B, rank]."""
        return torch.zeros(batch, self.w1.shape[1], dtype=torch.float32, device=self.w1.device)

    def step(self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> MarkovStep:
        """The step after token ids ``previous`` [B]; ``hidden`` [B, hidden] is the slot's normed row.

        * vanilla: e; gated: sigmoid(gate [h; e]) * e;
        * recurrent: (g, c, o) = joint [s; e; h], s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), operand tanh(o).

        Computed in float32; the operand is rounded to bfloat16, so that a kernel may multiply bfloat16 by bfloat16.
        """
        embedding = self.w1[previous]
        operand, state = self._operand(embedding.float(), hidden, state)
        return MarkovStep(embedding, operand.to(torch.bfloat16).float(), state)

    def bias(self, operand: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """Biases [B, N] bfloat16: rows of w2 times the operand [B, rank], summed in float32 and rounded once.

        ``ids`` [B, N] int64 names the rows; None is all of them, N the vocabulary.
        """
        if ids is None:
            return (operand @ self.w2.float().t()).to(torch.bfloat16)
        return torch.bmm(self.w2[ids].float(), operand.unsqueeze(2)).squeeze(2).to(torch.bfloat16)

    def _operand(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operand before rounding, and the state after this slot."""
        mixer = self.mixer
        if mixer is None:
            return embedding, state
        if self.kind is MarkovKind.GATED:
            gate = F.linear(torch.cat([hidden.float(), embedding], dim=-1), mixer.weight, mixer.bias)
            return torch.sigmoid(gate) * embedding, state
        mixed = F.linear(torch.cat([state, embedding, hidden.float()], dim=-1), mixer.weight, mixer.bias)
        keep, new, out = mixed.chunk(3, dim=-1)
        return torch.tanh(out), torch.lerp(torch.tanh(new), state, torch.sigmoid(keep))
