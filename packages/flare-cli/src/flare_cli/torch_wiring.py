"""One rank's model on torch: device, pool size, collectives, weights. Part of the composition root.

Imports torch: ``wiring`` imports this module only when such a model is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from flare_cli.config import RunConfig
from flare_cli.control_group import ControlGroup
from flare_cli.wiring import RankModel, StageReport, host_memory_bytes, model_length, num_pages_for, pool_fact
from flare_core.compute.collectives import connect_collectives
from flare_core.compute.identity import default_digest_cache
from flare_core.compute.kv_memory import geometry_for
from flare_core.compute.loading import LoadedRunner, load_runner
from flare_core.compute.model_config import read_config
from flare_core.errors import UsageError
from flare_spec.config import parse_speculative_config
from flare_spec.drafters import make_chooser, make_drafter

__all__ = ["open_torch"]

DEFAULT_POOL_SEQUENCES = 4
"""Without --kv-memory there is room for this many sequences of full length, as far as memory goes."""

CPU_SHARE = 0.4
CUDA_SHARE = 0.9
CUDA_RESERVE_BYTES = 3 << 30


def open_torch(
    config: RunConfig,
    directory: Path,
    group: ControlGroup,
    *,
    agree_pages: Callable[[int], int],
    report: StageReport,
) -> RankModel:
    """Load this rank's part; see ``wiring.open_model``."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _device(config)
    dtype = config.dtype if config.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    model = read_config(directory)
    length = model_length(config, model.max_position, model.max_position)
    geometries = [
        geometry_for(model, rank, config.world_size, page_tokens=config.page_tokens, kv_dtype=dtype)
        for rank in range(config.world_size)
    ]
    largest = max(geometry.page_bytes for geometry in geometries)
    wanted = DEFAULT_POOL_SEQUENCES * -(-length // config.page_tokens) * largest
    default_bytes = min(wanted, _pool_bytes(device, directory, config.world_size))
    num_pages = agree_pages(
        num_pages_for(config.kv_memory, geometries, default_bytes=default_bytes, capacity_bytes=_capacity_bytes(device))
    )
    speculative = None if config.speculative_config is None else parse_speculative_config(config.speculative_config)
    collectives = connect_collectives(
        group.key_value(),
        rank=config.rank,
        world_size=config.world_size,
        device=torch.device(device),
        bind_address=group.local_address,
        timeout_seconds=config.rendezvous_timeout,
    )
    loaded = load_runner(
        directory,
        rank=config.rank,
        world_size=config.world_size,
        collectives=collectives,
        device=device,
        dtype=dtype,
        page_tokens=config.page_tokens,
        num_pages=num_pages,
        max_sequences=config.max_sequences,
        max_model_len=length,
        make_drafter=None if speculative is None else lambda target: make_drafter(speculative, target),
        make_chooser=lambda target, drafter: make_chooser(speculative, target, drafter),
        digest_cache=default_digest_cache(),
        progress=report,
    )
    return _described(loaded, directory, device=device, dtype=dtype, num_pages=num_pages)


def _described(loaded: LoadedRunner, directory: Path, *, device: str, dtype: str, num_pages: int) -> RankModel:
    return RankModel(
        runner=loaded.runner,
        memory=loaded.memory,
        identity=loaded.identity,
        vocab_size=loaded.config.vocab_size,
        max_model_len=loaded.max_model_len,
        num_pages=num_pages,
        num_row_snapshots=0,
        plan_lead=0 if device == "cpu" else 1,
        max_drafts=0 if loaded.runner.drafter is None else loaded.runner.drafter.max_drafts,
        facts=(
            ("model", f"{directory}, {dtype} on {device}, context {loaded.max_model_len} tokens"),
            pool_fact(num_pages, loaded.identity),
        ),
    )


def _device(config: RunConfig) -> str:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        msg = f"--device {config.device}: this machine, or this build of torch, has no CUDA device"
        raise UsageError(msg)
    # Ranks of one host are numbered in a row by every launcher, so each gets a device of its own.
    count = torch.cuda.device_count()
    device = f"cuda:{config.rank % count}" if config.device in {"auto", "cuda"} else config.device
    if int(device.partition(":")[2]) >= count:
        msg = f"--device {config.device}: this machine has {count} CUDA devices"
        raise UsageError(msg)
    torch.cuda.set_device(device)
    return device


def _capacity_bytes(device: str) -> int:
    """All the memory that the device has, in use or not."""
    return host_memory_bytes() if device == "cpu" else int(torch.cuda.mem_get_info(device)[1])


def _pool_bytes(device: str, directory: Path, world_size: int) -> int:
    """Bytes that a pool may take where nobody has said how many."""
    if device == "cpu":
        return int(CPU_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    free, _ = torch.cuda.mem_get_info(device)
    weights = sum(path.stat().st_size for path in directory.glob("**/*.safetensors")) // world_size
    return max(0, int(CUDA_SHARE * free) - weights - CUDA_RESERVE_BYTES)
