"""The Markov walk of a block on a GPU: one launch for all slots of all sequences.

Owns which calls the kernel takes and its launch; the operation, its rounding and its eager form are
:func:`flare_spec.dspark.block_sampling.markov_sample_block`.
"""

from __future__ import annotations

from typing import Final

import torch

from flare_core.compute.philox import STREAM_DRAFT
from flare_spec.dspark.block_sampling import MarkovBlock
from flare_spec.dspark.config import MarkovKind
from flare_spec.dspark.markov import MarkovHead
from flare_spec.kernels.launch import Kernel, can_compile, load_kernel

__all__ = ["has_markov_walk", "markov_sample_block_cuda"]

_SOURCE: Final = "markov_walk.cu"
_THREADS: Final = 512
_MOST_COLUMNS: Final = 1024
_MOST_RANK: Final = 512
_SHARED_FLOATS: Final = 24 * 1024
"""Noise of a sequence's slots is held in shared memory, of which every device with bf16 has 99 KiB."""
_BF16_CAPABILITY: Final = (8, 0)


def has_markov_walk(base: torch.Tensor, ids: torch.Tensor | None, head: MarkovHead | None) -> bool:
    """Whether :func:`markov_sample_block_cuda` takes these: listed candidates, a vanilla head, and shapes that fit."""
    if ids is None or head is None or head.kind is not MarkovKind.VANILLA or not base.is_cuda:
        return False
    _, gamma, columns = base.shape
    rank = head.w1.shape[1]
    return (
        0 < columns <= _MOST_COLUMNS
        and 0 < gamma * columns <= _SHARED_FLOATS
        and rank % 8 == 0
        and 0 < rank <= _MOST_RANK
        and head.w1.dtype == head.w2.dtype
        and head.w1.dtype in (torch.bfloat16, torch.float32)
        and all(weight.is_contiguous() and weight.data_ptr() % 16 == 0 for weight in (head.w1, head.w2))
        and torch.cuda.get_device_capability(base.device) >= _BF16_CAPABILITY
        and can_compile()
    )


def markov_sample_block_cuda(
    base: torch.Tensor,
    ids: torch.Tensor,
    head: MarkovHead,
    *,
    anchors: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int = STREAM_DRAFT,
) -> MarkovBlock:
    """What ``markov_sample_block`` gives for the same arguments, in one launch, without waiting for the device.

    Dot products are summed in another order, so a bias can be the bfloat16 beside the reference's; scores and tokens
    follow from it exactly as there. Takes what :func:`has_markov_walk` says.
    """
    batch, gamma, columns = base.shape
    rank = head.w1.shape[1]
    tokens = torch.empty((batch, gamma), dtype=torch.int64, device=base.device)
    scores = torch.empty((batch, gamma, columns), dtype=torch.bfloat16, device=base.device)
    features = torch.empty((batch, gamma, rank), dtype=head.w1.dtype, device=base.device)
    if batch:
        _kernel(base.device, gamma * columns, is_wide=head.w1.dtype == torch.float32).launch(
            batch,
            _THREADS,
            base.contiguous(),
            ids.contiguous(),
            head.w1,
            head.w2,
            anchors.contiguous(),
            temperatures.contiguous(),
            seeds.contiguous(),
            positions.contiguous(),
            tokens,
            scores,
            features,
            gamma,
            columns,
            rank,
            stream,
        )
    return MarkovBlock(tokens, scores, features)


def _kernel(device: torch.device, num_floats: int, *, is_wide: bool) -> Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    # Sizes by the power of two, lest every number of candidates loads a kernel of its own.
    shared_bytes = min(_SHARED_FLOATS, 1 << (num_floats - 1).bit_length()) * 4
    return load_kernel(
        _SOURCE,
        "markov_walk",
        device,
        defines=(("WIDE", int(is_wide)),),
        architecture=f"sm_{major}{minor}",
        shared_bytes=shared_bytes,
    )
