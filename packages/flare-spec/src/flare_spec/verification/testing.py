"""For tests and measurements of verification: counted collectives, gloo between threads, divided vocabularies,
chi-squared tests.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from flare_core.compute.collectives import TensorCollectives, connect_collectives
from flare_core.sharding import Span
from flare_core.testing.torch_ranks import run_ranks

__all__ = ["CountingCollectives", "chi_squared_p_value", "connect_threads", "goodness_of_fit", "spans_of"]

_LEAST_EXPECTED = 5.0
"""Cells with fewer expected draws are counted together."""


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


class _ThreadTable:
    """A :class:`flare_core.ports.KeyValue` for threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        self.wait([key], timeout_seconds=timeout_seconds)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def wait(self, keys: Sequence[str], *, timeout_seconds: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout_seconds):
                raise TimeoutError(f"no value for {keys}")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._changed:
            if self._values.get(key, b"") == expected:
                self._values[key] = desired
            return self._values.get(key, b"")

    def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)


def connect_threads(world_size: int) -> list[TensorCollectives]:
    """Collectives by rank over gloo on the loopback address, for threads of this process; blocks until all are up."""
    table = _ThreadTable()
    return run_ranks(
        world_size,
        lambda rank, _: connect_collectives(
            table, rank=rank, world_size=world_size, device=torch.device("cpu"), bind_address="127.0.0.1"
        ),
    )


def spans_of(widths: Sequence[int]) -> list[Span]:
    """Spans of these widths, which may be 0, one after the other."""
    stops = [sum(widths[: index + 1]) for index in range(len(widths))]
    return [Span(stop - width, stop) for stop, width in zip(stops, widths, strict=True)]


def goodness_of_fit(observed: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """Chance of draws at least this far from ``probabilities`` (Pearson); both [cells].

    Cells too rare to be tested alone are one. A draw where the probability is 0 gives 0.
    """
    if observed[probabilities <= 0.0].any():
        return 0.0
    expected = probabilities * observed.sum() / probabilities.sum()
    order = np.argsort(-expected)
    expected, observed = expected[order], observed[order]
    num_cells = int((expected >= _LEAST_EXPECTED).sum())
    rest = expected[num_cells:].sum()
    if rest < _LEAST_EXPECTED and num_cells > 1:
        num_cells -= 1
    cells = [*range(num_cells), num_cells] if num_cells < len(expected) else [*range(num_cells)]
    expected, observed = np.add.reduceat(expected, cells), np.add.reduceat(observed, cells)
    statistic = float(((observed - expected) ** 2 / np.maximum(expected, 1e-300)).sum())
    return chi_squared_p_value(statistic, len(expected) - 1)


def chi_squared_p_value(statistic: float, num_degrees: int) -> float:
    """Chance that a chi-squared variable exceeds ``statistic``: the regularised gamma function Q(k/2, x/2).

    Below the mean by its power series, above by its continued fraction (Lentz), as in DLMF 8.7.1 and 8.9.2.
    """
    shape, x = num_degrees / 2, statistic / 2
    if num_degrees == 0 or x <= 0:
        return 1.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        for index in range(1, 10_000):
            term *= x / (shape + index)
            total += term
            if term < total * 1e-16:
                break
        return max(0.0, 1 - total * scale)
    b = x + 1 - shape
    c, d = 1e300, 1 / b
    fraction = d
    for index in range(1, 10_000):
        a = -index * (index - shape)
        b += 2
        d = 1 / (a * d + b)
        c = b + a / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return fraction * scale
