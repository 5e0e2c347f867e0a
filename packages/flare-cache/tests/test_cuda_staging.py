"""Staging for device pages, over a stand-in for the CUDA runtime whose device memory is host memory."""

# ruff: noqa: N802 - CUDA's calls are named as CUDA names them
from __future__ import annotations

import ctypes
import os
import sys
from types import SimpleNamespace

import pytest

from flare_cache.cuda_staging import open_cuda_staging
from flare_cache.host_memory import DeviceFault
from flare_cache.host_pages import HostPages
from flare_cache.jobs import JobStatus
from flare_core.prefix import Tier

BUFFER_BYTES = 32 << 10
TO_DEVICE, TO_HOST = object(), object()


class Runtime(SimpleNamespace):
    """The calls that staging makes; copies happen when the stream is waited for, as late as they may."""

    def __init__(self) -> None:
        super().__init__(
            cudaMemcpyKind=SimpleNamespace(cudaMemcpyHostToDevice=TO_DEVICE, cudaMemcpyDeviceToHost=TO_HOST),
            cudaMemcpySrcAccessOrder=SimpleNamespace(cudaMemcpySrcAccessOrderStream=1),
            cudaMemcpyAttributes=SimpleNamespace,
            cudaHostRegisterDefault=0,
            cudaStreamNonBlocking=1,
        )
        self.pending: dict[int, list[tuple[int, int, int]]] = {}
        self.registered: set[int] = set()
        self.num_copies = self.num_batches = 0
        self.error = 0

    def cudaSetDevice(self, device):
        return (0 if device == 0 else 101,)

    def cudaHostRegister(self, address, num_bytes, flags):
        self.registered.add(address)
        return (0,)

    def cudaHostUnregister(self, address):
        self.registered.remove(address)
        return (0,)

    def cudaStreamCreateWithFlags(self, flags):
        self.pending[len(self.pending)] = []
        return (0, len(self.pending) - 1)

    def cudaStreamDestroy(self, stream):
        del self.pending[stream]
        return (0,)

    def cudaMemcpyAsync(self, target, source, num_bytes, kind, stream):
        assert (target if kind is TO_HOST else source) % 4096 == 0
        self.num_copies += 1
        self.pending[stream].append((target, source, num_bytes))
        return (0,)

    def cudaMemcpyBatchAsync(self, targets, sources, sizes, count, attributes, indices, num_attributes, stream):
        assert len(targets) == len(sources) == len(sizes) == count
        assert (attributes[0].srcAccessOrder, indices, num_attributes) == (1, [0], 1)
        self.num_batches += 1
        self.pending[stream] += list(zip(targets, sources, sizes, strict=True))
        return (0,)

    def cudaStreamSynchronize(self, stream):
        for target, source, num_bytes in self.pending[stream]:
            ctypes.memmove(target, source, num_bytes)
        self.pending[stream].clear()
        return (self.error,)


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    made = Runtime()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", made)
    return made


class ScatteredPages(HostPages):
    """Each page in eight pieces that lie apart, as in an engine that keeps its layers apart."""

    __slots__ = ()

    def page_segments(self, page: int):
        piece = self.geometry.page_bytes // 8
        return [(self.base + number * piece * self.num_pages + page * piece, piece) for number in range(8)]

    def gather(self, page: int) -> bytes:
        return b"".join(ctypes.string_at(*segment) for segment in self.page_segments(page))


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.MEMORY])
@pytest.mark.parametrize("kind", [HostPages, ScatteredPages])
def test_records_go_through_staging_unharmed(open_rank, new_identity, new_geometry, runtime, tier, kind) -> None:
    staging = open_cuda_staging(0, num_buffers=2, buffer_bytes=BUFFER_BYTES)
    pages = kind.allocate(new_geometry(), num_pages=24, num_slots=3)
    pages.buffer[:] = os.urandom(len(pages.buffer))
    rank = open_rank(pages=pages, passage=staging)
    record = new_identity(num_pages=6)
    assert rank.store(record, tier=tier).status is JobStatus.OK
    assert rank.fetch(record, tier=tier).status is JobStatus.OK
    if kind is ScatteredPages:
        assert [pages.gather(12 + i) for i in range(7)] == [pages.gather(i) for i in range(7)]
        assert runtime.num_batches
    else:
        assert rank.page_bytes(12, 7) == rank.page_bytes(0, 7)
        assert pages.row(1) == pages.row(0)
    assert staging.idle.qsize() == 2
    staging.close()
    assert (runtime.registered, runtime.pending) == (set(), {})


def test_neighbouring_pages_are_copied_at_once(new_geometry, runtime) -> None:
    staging = open_cuda_staging(0, num_buffers=1, buffer_bytes=BUFFER_BYTES)
    pages = HostPages.allocate(new_geometry(), num_pages=6)
    with staging.outgoing([pages.page_segments(page) for page in (0, 1, 2, 5)]) as window:
        assert [len(section[0]) for section in window.sections] == [pages.geometry.page_bytes] * 4
        window.deliver()
    assert runtime.num_copies == 2


def test_a_buffer_comes_back_from_a_failed_read_and_not_from_a_failed_copy(new_geometry, runtime) -> None:
    staging = open_cuda_staging(0, num_buffers=2, buffer_bytes=BUFFER_BYTES)
    pages = HostPages.allocate(new_geometry(), num_pages=1)
    with pytest.raises(KeyError), staging.incoming([pages.page_segments(0)]):
        raise KeyError
    assert staging.idle.qsize() == 2
    runtime.error = 700
    with pytest.raises(DeviceFault, match="700"), staging.incoming([pages.page_segments(0)]) as window:
        window.deliver()
    assert staging.idle.qsize() == 1


def test_a_device_that_is_not_there_is_a_fault(runtime) -> None:
    with pytest.raises(DeviceFault):
        open_cuda_staging(3, num_buffers=1, buffer_bytes=BUFFER_BYTES)
