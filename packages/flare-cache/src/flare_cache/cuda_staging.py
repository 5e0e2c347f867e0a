"""Page-locked staging between device memory and files: one buffer and one copy stream for each disk thread.

A thread borrows a buffer, reads a part of a file into it, verifies it, and has it copied to the pages on the buffer's
own stream, which it waits for; the other threads' reads and copies go on meanwhile. Needs ``cuda-python`` and a
driver of CUDA 12.8 or later; torch is not involved, pages are addresses. Buffers are unregistered by ``close`` only,
which must not be called while a copy may still run.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flare_cache.host_memory import DeviceFault, Segments, Window, new_mapping

__all__ = ["CudaStaging", "open_cuda_staging"]

_BATCH_FROM = 5
"""Copies from which on one batched call is cheaper than a call for each."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    mapping: mmap.mmap
    address: int
    stream: Any


@dataclass(frozen=True, slots=True)
class _Copy:
    device: int
    host: int
    length: int


@dataclass(frozen=True, slots=True)
class CudaStaging:
    """A :class:`flare_cache.host_memory.Passage` for pages in device memory.

    Attributes:
        device: ordinal of the device.
        part_bytes: size of a buffer; at least a page and a row.
        runtime: the module ``cuda.bindings.runtime``.
        idle: buffers that no thread uses; borrowing blocks until there is one.
        buffers: all of them.
    """

    device: int
    part_bytes: int
    runtime: Any
    idle: queue.LifoQueue[_Buffer]
    buffers: Sequence[_Buffer]

    @contextmanager
    def incoming(self, sections: Sequence[Segments]) -> Iterator[Window]:
        """A buffer to fill; ``deliver`` copies it to ``sections`` and returns when the copy has ended."""
        with self._borrowed() as buffer:
            views, copies = _lay_out(buffer, sections)
            yield Window(views, lambda: self._copy(buffer, copies, to_device=True))

    @contextmanager
    def outgoing(self, sections: Sequence[Segments]) -> Iterator[Window]:
        """A buffer that holds the bytes of ``sections``."""
        with self._borrowed() as buffer:
            views, copies = _lay_out(buffer, sections)
            self._copy(buffer, copies, to_device=False)
            yield Window(views, lambda: None)

    @contextmanager
    def _borrowed(self) -> Iterator[_Buffer]:
        buffer = self.idle.get()
        try:
            yield buffer
        except DeviceFault:
            raise  # a copy may still run into or out of this buffer: it is never lent again
        except BaseException:
            self.idle.put(buffer)
            raise
        else:
            self.idle.put(buffer)

    def _copy(self, buffer: _Buffer, copies: Sequence[_Copy], *, to_device: bool) -> None:
        runtime = self.runtime
        _check(runtime.cudaSetDevice(self.device))
        if len(copies) < _BATCH_FROM:
            kind = runtime.cudaMemcpyKind
            direction = kind.cudaMemcpyHostToDevice if to_device else kind.cudaMemcpyDeviceToHost
            for copy in copies:
                target, source = (copy.device, copy.host) if to_device else (copy.host, copy.device)
                _check(runtime.cudaMemcpyAsync(target, source, copy.length, direction, buffer.stream))
        else:
            hosts, devices = [copy.host for copy in copies], [copy.device for copy in copies]
            targets, sources = (devices, hosts) if to_device else (hosts, devices)
            sizes = [copy.length for copy in copies]
            order = runtime.cudaMemcpyAttributes()
            order.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            count = len(copies)
            _check(runtime.cudaMemcpyBatchAsync(targets, sources, sizes, count, [order], [0], 1, buffer.stream))
        _check(runtime.cudaStreamSynchronize(buffer.stream))

    def close(self) -> None:
        """Release buffers and streams. Only after the transport has drained. Raises DeviceFault."""
        _check(self.runtime.cudaSetDevice(self.device))
        for buffer in self.buffers:
            _check(self.runtime.cudaStreamDestroy(buffer.stream))
            _check(self.runtime.cudaHostUnregister(buffer.address))


def open_cuda_staging(device: int, *, num_buffers: int, buffer_bytes: int) -> CudaStaging:
    """Take and page-lock the buffers; ``num_buffers`` is the number of disk threads.

    ``buffer_bytes`` is at least the larger of page bytes and row stride, and bounds a part of a transfer.

    Raises:
        ModuleNotFoundError: ``cuda-python`` is not installed.
        DeviceFault: no such device, or the memory cannot be locked.
    """
    runtime = importlib.import_module("cuda.bindings.runtime")
    _check(runtime.cudaSetDevice(device))
    idle: queue.LifoQueue[_Buffer] = queue.LifoQueue()
    buffers: list[_Buffer] = []
    for _ in range(num_buffers):
        mapping = new_mapping(buffer_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        _check(runtime.cudaHostRegister(address, buffer_bytes, runtime.cudaHostRegisterDefault))
        stream = _check(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
        buffers.append(_Buffer(mapping, address, stream))
        idle.put(buffers[-1])
    return CudaStaging(device, buffer_bytes, runtime, idle, tuple(buffers))


def _check(returned: tuple[Any, ...]) -> Any:
    """The value of a CUDA call, which returns (error, value...)."""
    error, *values = returned
    if int(error) != 0:
        raise DeviceFault(str(error))
    return values[0] if values else None


def _lay_out(buffer: _Buffer, sections: Sequence[Segments]) -> tuple[list[list[memoryview]], list[_Copy]]:
    """Views of the buffer for each section, and the copies, those that are contiguous on both sides joined."""
    whole = memoryview(buffer.mapping)
    views: list[list[memoryview]] = []
    copies: list[_Copy] = []
    at = 0
    for segments in sections:
        start = at
        for address, length in segments:
            last = copies[-1] if copies else None
            if last is not None and last.device + last.length == address:
                copies[-1] = _Copy(last.device, last.host, last.length + length)
            else:
                copies.append(_Copy(address, buffer.address + at, length))
            at += length
        views.append([whole[start:at]])
    return views, copies
