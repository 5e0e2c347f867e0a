"""The confidence head: how likely each drafted token is to be accepted if all before it are.

Reads rows after the backbone's final norm. Its value for slot k depends on tokens before k only, never on the token
that is drawn there. Source: DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows

from flare_core.compute.layers import Projection

__all__ = ["ConfidenceHead", "confidence_logits", "confidences"]


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """``projection`` [1, hidden (+ rank)], float32; ``reads_markov``: the previous token's Markov embedding is read."""

    projection: Projection
    reads_markov: bool


def confidence_logits(head: ConfidenceHead, hidden: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """[..., gamma] float32, from normed rows [..., gamma, hidden] and Markov embeddings [..., gamma, rank]."""
    read = hidden.float()
    if head.reads_markov:
        read = torch.cat([read, features.float()], dim=-1)
    return F.linear(read, head.projection.weight, head.projection.bias).squeeze(-1)


def confidences(head: ConfidenceHead, hidden: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Probabilities in [0, 1], shaped as :func:`confidence_logits`."""
    return torch.sigmoid(confidence_logits(head, hidden, features))
