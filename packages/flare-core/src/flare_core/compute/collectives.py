"""Sums and gathers of tensors between the ranks of a model: nothing at world size 1, gloo or NCCL otherwise.

The process group is made directly, without torch's global one, over a :class:`flare_core.ports.KeyValue` that rides
on an authenticated link; gloo is bound to the address of the rendezvous interface.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from flare_core.compute.interfaces import interface_of
from flare_core.ports import KeyValue

__all__ = ["GroupCollectives", "KeyValueStore", "SingleRank", "TensorCollectives", "connect_collectives"]


class TensorCollectives(Protocol):
    """Collectives of one rank. Every rank calls the same ones in the same order; a call blocks or queues on the device.

    Attributes:
        rank, world_size: whose.
        num_collectives: calls so far, for benchmarks.
    """

    rank: int
    world_size: int
    num_collectives: int

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """``tensor`` becomes the sum over ranks, equal bit for bit on every rank."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[world_size, *shape]: every rank's ``tensor``, all of one shape, by rank."""
        ...


class SingleRank:
    """World size 1: nothing to exchange."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.num_collectives = 0

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Nothing: the sum of one tensor is itself."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with an axis of one rank."""
        return tensor.unsqueeze(0)


class GroupCollectives:
    """Collectives over one process group of torch."""

    def __init__(self, group: Any, store: Store, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_collectives = 0
        self._group = group
        # NCCL comes back to the store with the first collective; the group does not keep the Python object alive.
        self._store = store

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """As :meth:`TensorCollectives.all_reduce_`."""
        self.num_collectives += 1
        self._group.allreduce([tensor]).wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As :meth:`TensorCollectives.all_gather`."""
        self.num_collectives += 1
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        self._group.allgather([list(gathered.unbind(0))], [tensor.contiguous()]).wait()
        return gathered


class KeyValueStore(Store):
    """torch's rendezvous table on top of a :class:`flare_core.ports.KeyValue`.

    The one subclass that torch's C++ asks for: it calls these methods by their names.
    """

    def __init__(self, table: KeyValue, timeout_seconds: float) -> None:
        super().__init__()
        self._table = table
        self._timeout_seconds = timeout_seconds

    def set(self, key: str, value: str | bytes) -> None:
        """Store ``value``."""
        self._table.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """The value; blocks until it is set or the timeout has passed."""
        return self._table.get(key, timeout_seconds=self._timeout_seconds)

    def add(self, key: str, value: int) -> int:
        """Add to a counter; gives the sum."""
        return self._table.add(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set."""
        seconds = self._timeout_seconds if timeout is None else timeout.total_seconds()
        self._table.wait(list(keys), timeout_seconds=seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return self._table.check(list(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set where the value is the expected one; gives the value afterwards."""
        as_bytes = [item.encode() if isinstance(item, str) else bytes(item) for item in (expected, desired)]
        return self._table.compare_set(key, as_bytes[0], as_bytes[1])

    def delete_key(self, key: str) -> bool:
        """Forget the key."""
        return self._table.delete(key)

    def num_keys(self) -> int:
        """Number of keys."""
        return self._table.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        """How long :meth:`get` and :meth:`wait` block."""
        self._timeout_seconds = timeout.total_seconds()


def connect_collectives(
    table: KeyValue,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    bind_address: str,
    timeout_seconds: float = 600.0,
) -> TensorCollectives:
    """Join the group; blocks until every rank has. ``bind_address`` is the local address of the collectives' sockets
    (NCCL takes the interface that has it, unless ``NCCL_SOCKET_IFNAME`` says otherwise).

    Raises:
        RuntimeError: a rank did not come in ``timeout_seconds`` (from torch).
    """
    if world_size == 1:
        return SingleRank()
    store = KeyValueStore(table, timeout_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        _bind_nccl(bind_address)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return GroupCollectives(
            dist.ProcessGroupNCCL(store, rank, world_size, nccl), store, rank=rank, world_size=world_size
        )
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=bind_address)]
    options._timeout = timeout
    return GroupCollectives(gloo(store, rank, world_size, options), store, rank=rank, world_size=world_size)


def _bind_nccl(bind_address: str) -> None:
    """NCCL reads its settings from the environment when it is first used, and takes an interface by its name alone."""
    interface = interface_of(bind_address)
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
