"""Several numbers a row in one collective: fields of different types side by side as 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flare_core.compute.collectives import TensorCollectives

__all__ = ["gather_fields"]


def gather_fields(collectives: TensorCollectives, fields: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's ``fields`` by rank: [n, ...] becomes [world size, n, ...], bits unchanged, in one all-gather.

    Fields have one or two axes, the same n on the first, elements of 32 or 64 bits, and equal shapes on every rank.
    Blocks until every rank has come.
    """
    words = [(field if field.ndim == 2 else field.unsqueeze(1)).contiguous().view(torch.int32) for field in fields]
    gathered = collectives.all_gather(torch.cat(words, dim=1))
    parts = torch.split_with_sizes(gathered, [word.shape[1] for word in words], dim=2)
    return [
        # A copy starts at a multiple of 64 bits, which the view as a wider type asks for.
        part.clone(memory_format=torch.contiguous_format).view(field.dtype).view(len(gathered), *field.shape)
        for part, field in zip(parts, fields, strict=True)
    ]
