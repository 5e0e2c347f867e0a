"""Compiles CUDA sources that lie beside this module and launches their kernels on torch's streams. Knows no kernel."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from flare_core.errors import FlareError

__all__ = ["Kernel", "KernelError", "can_compile", "load_kernel"]

_OVERLAP_ATTRIBUTE: Final = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"


class KernelError(FlareError):
    """A kernel could not be compiled, loaded or launched."""


@cache
def can_compile() -> bool:
    """Whether cuda-python is installed and finds NVRTC; without them no kernel is compiled."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return False
    try:
        code, *_ = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except RuntimeError:  # what its loader raises where the library is missing
        return False
    return int(code) == 0


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A function on one device.

    Attributes:
        function: the driver's handle.
        shared_bytes: dynamic shared memory of each block.
        overlaps: whether it may begin while the launch before it on the stream still runs, for which it waits itself.
    """

    function: Any
    shared_bytes: int
    overlaps: bool

    def launch(self, grid: int, threads: int, *arguments: torch.Tensor | int | float) -> None:
        """Enqueue ``grid`` blocks of ``threads`` on the current stream of the tensors' device.

        Arguments: tensors go as their address, numbers as ``int`` and ``float``. The caller keeps tensors alive, as
        torch's allocator does for work on the stream they were made on.
        """
        device = next(item.device for item in arguments if isinstance(item, torch.Tensor))
        driver = importlib.import_module("cuda.bindings.driver")
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        if self.overlaps:
            attribute = driver.CUlaunchAttribute()
            attribute.id = getattr(driver.CUlaunchAttributeID, _OVERLAP_ATTRIBUTE)
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        with torch.cuda.device(device):
            _ensure_context(driver, device)
            config.hStream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
            values, types = zip(*(_argument(item) for item in arguments), strict=True)
            _check(driver.cuLaunchKernelEx(config, self.function, (values, types), 0))


@cache
def load_kernel(
    source: str,
    name: str,
    device: torch.device,
    *,
    defines: tuple[tuple[str, int], ...] = (),
    architecture: str,
    shared_bytes: int = 0,
    overlaps: bool = False,
) -> Kernel:
    """Kernel ``name`` of file ``source``, for ``device``; blocks while it is compiled, once a process (seconds).

    ``architecture``: such as ``sm_90a``. Raises :class:`KernelError` with the compiler's words.
    """
    driver = importlib.import_module("cuda.bindings.driver")
    image = _compile(source, defines, architecture)
    with torch.cuda.device(device):
        _ensure_context(driver, device)
        module = _check(driver.cuModuleLoadData(image))
        function = _check(driver.cuModuleGetFunction(module, name.encode()))
        if shared_bytes:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    return Kernel(function, shared_bytes, overlaps)


@cache
def _compile(source: str, defines: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    text = Path(__file__).with_name(source).read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines)]
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(result) != 0:
            log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            raise KernelError(f"{source} does not compile for {architecture}: {log.decode(errors='replace').strip()}")
        image: bytes = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, image))
        return image
    finally:
        _check(nvrtc.nvrtcDestroyProgram(program))


def _ensure_context(driver: Any, device: torch.device) -> None:
    """A thread that has not called the runtime yet has no context, which the driver's functions need."""
    if int(_check(driver.cuCtxGetCurrent())) == 0:
        torch.cuda.set_device(device)


def _argument(item: torch.Tensor | int | float) -> tuple[Any, Any]:
    if isinstance(item, torch.Tensor):
        return item.data_ptr(), ctypes.c_void_p
    return item, ctypes.c_float if isinstance(item, float) else ctypes.c_int


def _check(answer: tuple[Any, ...]) -> Any:
    """The value beside a result code; a code that is not success raises."""
    code, *values = answer
    if int(code) != 0:
        raise KernelError(f"CUDA answers {code.name} ({int(code)})")
    return values[0] if values else None
