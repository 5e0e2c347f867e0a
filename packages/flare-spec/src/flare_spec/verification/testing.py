"""For tests and measurements of verification: counted collectives, vocabularies divided at will."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flare_core.compute.collectives import TensorCollectives
from flare_core.sharding import Span

__all__ = ["CountingCollectives", "spans_of"]


class CountingCollectives:
    """Counts what passes through another communicator.

    Attributes:
        num_collectives: calls so far.
        received_bytes: bytes that the rank had of other ranks: of a gather the parts of all others, of a sum one
            tensor's worth (what a ring brings in is up to twice that).
    """

    def __init__(self, inner: TensorCollectives) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.num_collectives = 0
        self.received_bytes = 0
        self._inner = inner

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """As :meth:`flare_core.compute.collectives.TensorCollectives.all_reduce_`."""
        self.num_collectives += 1
        self.received_bytes += tensor.nbytes if self.world_size > 1 else 0
        self._inner.all_reduce_(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`flare_core.compute.collectives.TensorCollectives.all_gather`."""
        self.num_collectives += 1
        self.received_bytes += tensor.nbytes * (self.world_size - 1)
        return self._inner.all_gather(tensor)


def spans_of(widths: Sequence[int]) -> list[Span]:
    """Spans of these widths, which may be 0, one after the other."""
    stops = [sum(widths[: index + 1]) for index in range(len(widths))]
    return [Span(stop - width, stop) for stop, width in zip(stops, widths, strict=True)]
