"""Puts a runner together from a model directory: what the command line's wiring calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from flare_core.compute.attention import PagedAttention
from flare_core.compute.attention_cpu import CpuAttention
from flare_core.compute.attention_cuda import GatherAttention
from flare_core.compute.checkpoint import open_checkpoint
from flare_core.compute.choosing import TokenChooser
from flare_core.compute.collectives import SingleRank, TensorCollectives
from flare_core.compute.huge_pages import collapse_large_mappings
from flare_core.compute.identity import Progress
from flare_core.compute.kv_memory import KvMemory, geometry_for, pages_for_bytes
from flare_core.compute.model_config import ModelConfig, read_eos_token_ids
from flare_core.compute.runner import NUMERICS, TorchRunner
from flare_core.compute.sharded_model import ShardedModel
from flare_core.compute.tensor_layout import rank_shard
from flare_core.compute.weights import load_model
from flare_core.errors import UsageError
from flare_core.geometry import Geometry, SetIdentity
from flare_core.ports import Drafter

__all__ = ["LoadedRunner", "load_runner"]

_DEFAULT_SEQUENCES = 4
"""Sequences of full length that the pool has room for when nothing says how large it is."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner and what the parts around it need to know.

    Attributes:
        runner: executes step plans.
        memory: the rank's pages, for transfers.
        config: what the model is.
        eos_token_ids: ids that end an output.
        identity: what the record set and the keys are named by; equal on all ranks.
        max_model_len: tokens a sequence may have.
    """

    runner: TorchRunner
    memory: KvMemory
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    identity: SetIdentity
    max_model_len: int


def load_runner(
    model_dir: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    collectives: TensorCollectives | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    page_tokens: int = 64,
    num_pages: int | None = None,
    kv_bytes: int | None = None,
    max_sequences: int = 64,
    max_model_len: int | None = None,
    make_drafter: Callable[[ShardedModel], Drafter] | None = None,
    make_chooser: Callable[[ShardedModel, Drafter | None], TokenChooser] | None = None,
    digest_cache: Path | None = None,
    progress: Progress | None = None,
) -> LoadedRunner:
    """Open ``model_dir`` (a Hugging Face directory or a package), read the rank's weights, allocate its pages.

    Pages come from ``num_pages`` or from ``kv_bytes`` on the rank with the largest pages; with neither there is
    room for four sequences of ``max_model_len``, which is by default the model's own limit.
    ``collectives`` may be left out at world size 1 only. ``make_drafter`` and ``make_chooser`` are given the model, and
    the latter the drafter. Blocks on the disk.

    Raises:
        UsageError: settings that do not fit the model (dtype, world size, lengths, memory).
        CheckpointError, UnsupportedModel: the model cannot be read.
    """
    _check(dtype, world_size, collectives)
    checkpoint = open_checkpoint(model_dir, rank, world_size, digest_cache=digest_cache, progress=progress)
    config = checkpoint.config
    length = _model_length(config, max_model_len)
    geometries = tuple(
        geometry_for(config, each, world_size, page_tokens=page_tokens, kv_dtype=dtype) for each in range(world_size)
    )
    if num_pages is None:
        num_pages = _DEFAULT_SEQUENCES * -(-length // page_tokens)
        num_pages = num_pages if kv_bytes is None else pages_for_bytes(geometries, kv_bytes)
    target = torch.device(device)
    model = load_model(
        checkpoint,
        rank_shard(config, rank, world_size),
        collectives or SingleRank(),
        dtype=_DTYPES[dtype],
        device=target,
        progress=progress,
    )
    if target.type == "cpu":
        collapse_large_mappings()
    memory = KvMemory.allocate(geometries[rank], num_pages, target)
    return LoadedRunner(
        runner=_make_runner(model, memory, make_drafter, make_chooser, max_sequences=max_sequences),
        memory=memory,
        config=config,
        eos_token_ids=read_eos_token_ids(model_dir, config),
        identity=_identity(checkpoint.identity, geometries, page_tokens=page_tokens, dtype=dtype, device=target),
        max_model_len=length,
    )


def _check(dtype: str, world_size: int, collectives: TensorCollectives | None) -> None:
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known; use {' or '.join(_DTYPES)}")
    if collectives is None and world_size > 1:
        raise UsageError(f"world size {world_size} needs collectives")


def _make_runner(
    model: ShardedModel,
    memory: KvMemory,
    make_drafter: Callable[[ShardedModel], Drafter] | None,
    make_chooser: Callable[[ShardedModel, Drafter | None], TokenChooser] | None,
    *,
    max_sequences: int,
) -> TorchRunner:
    attention: PagedAttention = CpuAttention(memory) if memory.views.device.type == "cpu" else GatherAttention(memory)
    drafter = None if make_drafter is None else make_drafter(model)
    choose = None if make_chooser is None else make_chooser(model, drafter)
    return TorchRunner(model, memory, attention, max_sequences=max_sequences, drafter=drafter, choose=choose)


def _identity(
    model: bytes, geometries: tuple[Geometry, ...], *, page_tokens: int, dtype: str, device: torch.device
) -> SetIdentity:
    return SetIdentity(
        model=model,
        page_tokens=page_tokens,
        kv_dtype=dtype,
        compute_dtype=dtype,
        device_kind=device.type,
        numerics=NUMERICS,
        geometries=geometries,
    )


def _model_length(config: ModelConfig, asked: int | None) -> int:
    if asked is None:
        return config.max_position
    if not 1 <= asked <= config.max_position:
        raise UsageError(f"max model length {asked} is not within 1 and the model's {config.max_position}")
    return asked
