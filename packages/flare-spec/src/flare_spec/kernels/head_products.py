"""Products of rows with quantised heads on Hopper GPUs, through one kernel for three formats.

Owns which shapes the kernel takes, its tile sizes and its scratch memory; not what formats mean (the formats' modules
hold the reference) nor the arithmetic (``head_product.cu``).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import torch

from flare_core.errors import UsageError
from flare_spec.kernels.launch import Kernel, can_compile, load_kernel

__all__ = ["HeadKind", "has_head_product", "head_product"]

MAX_TOKENS: Final = 64
_SOURCE: Final = "head_product.cu"
_ARCHITECTURE: Final = "sm_90a"
_CAPABILITY: Final = (9, 0)  # instructions of sm_90a exist there alone
_CHUNK_BYTES: Final = 64
_IMAGE_STAGES: Final = 4
_SPAN_INPUTS: Final = 512
_WARPGROUPS: Final = 4
_TOKENS: Final = (8, 16, MAX_TOKENS)
_PREPARE_THREADS: Final = 512
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class HeadKind(enum.IntEnum):
    """Format of a weight; the values are the source's."""

    FP8 = 0
    MXFP8 = 1
    NVFP4 = 2


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a kernel is cut: tiles of 64 rows of a warpgroup, chunks in flight, buffers of operands."""

    tiles: int
    stages: int
    buffers: int

    @property
    def most_rows(self) -> int:
        """Weight rows that a block works on at once."""
        return _WARPGROUPS * self.tiles * 64


# The fastest of those measured on an H200 with a head of 129,280 x 4,096, by format and rows of the image.
_TILINGS: Final = {
    (HeadKind.FP8, 8): _Tiling(2, 4, 2),
    (HeadKind.FP8, 16): _Tiling(2, 4, 2),
    (HeadKind.FP8, 64): _Tiling(2, 6, 1),
    (HeadKind.MXFP8, 8): _Tiling(2, 4, 1),
    (HeadKind.MXFP8, 16): _Tiling(2, 4, 2),
    (HeadKind.MXFP8, 64): _Tiling(2, 4, 1),
    (HeadKind.NVFP4, 8): _Tiling(2, 4, 1),
    (HeadKind.NVFP4, 16): _Tiling(2, 4, 2),
    (HeadKind.NVFP4, 64): _Tiling(1, 5, 1),
}


def has_head_product(weight: torch.Tensor) -> bool:
    """Whether :func:`head_product` takes ``weight``, codes [N, bytes of a row] of one byte each."""
    return (
        weight.is_cuda
        and weight.is_contiguous()
        and weight.shape[1] % 16 == 0
        and weight.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(weight.device) == _CAPABILITY
        and can_compile()
    )


def head_product(
    kind: HeadKind, rows: torch.Tensor, weight: torch.Tensor, *, scales: torch.Tensor, tensor_scale: torch.Tensor | None
) -> torch.Tensor:
    """``rows`` (bf16, fp16 or fp32, [M, K]) times the weight transposed: fp32 [M, N].

    ``weight``: codes [N, K], of NVFP4 [N, K/2]; ``scales``: fp32 [N] of FP8, else one byte a block, [N, K/32] or
    [N, K/16]. Rows are multiplied as 16-bit numbers: for MXFP8 rounded to bf16; else to fp16 once a power of two has
    put their greatest magnitude at 2**14 or more. Weights are exact, sums fp32. MXFP8's scales are 2**-57 to 2**67.
    """
    num_rows, row_bytes = weight.shape
    num_inputs = row_bytes * (2 if kind is HeadKind.NVFP4 else 1)
    if rows.ndim != 2 or rows.shape[1] != num_inputs or rows.dtype not in _DTYPES:
        raise UsageError(
            f"rows of shape {tuple(rows.shape)}, {rows.dtype}, do not fit a head of shape {(num_rows, num_inputs)}"
        )
    rows, scales = rows.contiguous(), scales.contiguous()
    logits = torch.empty((rows.shape[0], num_rows), dtype=torch.float32, device=rows.device)
    for start in range(0, rows.shape[0], MAX_TOKENS):
        stop = start + MAX_TOKENS
        _multiply(kind, rows[start:stop], weight, scales=scales, tensor_scale=tensor_scale, logits=logits[start:stop])
    return logits


def _multiply(
    kind: HeadKind,
    rows: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | None,
    logits: torch.Tensor,
) -> None:
    num_tokens, num_inputs = rows.shape
    num_rows, row_bytes = weight.shape
    tokens = next(size for size in _TOKENS if num_tokens <= size)
    tiling = _TILINGS[kind, tokens]
    span = 1 if kind is HeadKind.FP8 else _SPAN_INPUTS // _chunk_inputs(kind)
    num_chunks = -(-row_bytes // (_CHUNK_BYTES * span)) * span
    num_steps = num_chunks * _chunk_inputs(kind) // 16
    image = torch.empty(num_steps * 32 * tokens, dtype=torch.uint8, device=rows.device)
    factors = torch.empty(tokens, dtype=torch.float32, device=rows.device)
    prepare, product = _kernels(kind, tokens, tiling, weight.device)
    dtype = _DTYPES.index(rows.dtype)
    prepare.launch(tokens, _PREPARE_THREADS, rows, image, factors, num_tokens, num_inputs, num_steps, dtype)
    num_blocks = torch.cuda.get_device_properties(weight.device).multi_processor_count
    tile_rows = _tile_rows(num_rows, num_blocks, tiling.most_rows)
    product.launch(
        min(num_blocks, -(-num_rows // tile_rows)),
        _WARPGROUPS * 128,
        weight,
        scales,
        scales,
        scales if tensor_scale is None else tensor_scale,
        image,
        factors,
        logits,
        num_rows,
        num_tokens,
        row_bytes,
        scales.shape[-1],
        num_chunks,
        tile_rows,
    )


def _tile_rows(num_rows: int, num_blocks: int, most: int) -> int:
    """Rows of a tile, so that all blocks get as many tiles; a multiple of 8, whose logits fill a sector of memory."""
    num_passes = -(-num_rows // (num_blocks * most))
    return min(most, -(-num_rows // (num_passes * num_blocks * 8)) * 8)


def _kernels(kind: HeadKind, tokens: int, tiling: _Tiling, device: torch.device) -> tuple[Kernel, Kernel]:
    defines = (
        ("FORMAT", int(kind)),
        ("TOKENS", tokens),
        ("WARPGROUPS", _WARPGROUPS),
        ("TILES", tiling.tiles),
        ("STAGES", tiling.stages),
        ("BUFFERS", tiling.buffers),
    )
    fifo_bytes = tiling.stages * tiling.most_rows * _CHUNK_BYTES
    image_bytes = _IMAGE_STAGES * (_chunk_inputs(kind) * tokens * 2 + 16)
    shared_bytes = fifo_bytes + _scales_bytes(kind, tiling) + image_bytes
    prepare = load_kernel(_SOURCE, "prepare_rows", device, defines=defines, architecture=_ARCHITECTURE)
    product = load_kernel(
        _SOURCE,
        "head_product",
        device,
        defines=defines,
        architecture=_ARCHITECTURE,
        shared_bytes=shared_bytes,
        overlaps=True,
    )
    return prepare, product


def _chunk_inputs(kind: HeadKind) -> int:
    return 2 * _CHUNK_BYTES if kind is HeadKind.NVFP4 else _CHUNK_BYTES


def _scales_bytes(kind: HeadKind, tiling: _Tiling) -> int:
    """Shared memory for two spans of block scales."""
    block = {HeadKind.FP8: 0, HeadKind.MXFP8: 32, HeadKind.NVFP4: 16}[kind]
    return 2 * tiling.most_rows * (_SPAN_INPUTS // block) if block else 0
