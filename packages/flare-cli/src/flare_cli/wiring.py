"""The composition root: from a configuration to the parts of one rank. The only place that knows every concrete class.

torch is imported inside the functions that need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from flare_cli.config import KvMemory, RunConfig
from flare_cli.control_group import ControlGroup
from flare_cli.failpoints import with_failpoints
from flare_cli.units import format_size
from flare_core.errors import UsageError
from flare_core.geometry import Geometry, SetIdentity
from flare_core.ports import ModelRunner, PageMemory

__all__ = [
    "RankModel",
    "StageReport",
    "export_model",
    "host_memory_bytes",
    "model_length",
    "num_pages_for",
    "open_model",
    "pool_fact",
]

ORACLE_POOL_BYTES = 64 << 20
ORACLE_MAX_MODEL_LEN = 131_072


class StageReport(Protocol):
    """How far something slow has come."""

    def __call__(self, text: str, num_done: int = 0, total: int = 0) -> None: ...


@dataclass(frozen=True, slots=True)
class RankModel:
    """One rank's model, ready to run plans.

    Attributes:
        identity: equal on all ranks.
        num_pages: of the device pool, equal on all ranks.
        num_row_snapshots: row slots beyond those of the sequences.
        plan_lead: steps to plan ahead where nobody says: on a device that computes while the next step is planned, one;
            where a launch computes at once, planning ahead would only hold every token back by a step.
        max_drafts: tokens that may be drafted for a sequence in a step; 0: nothing is.
        facts: (label, text) lines for people.
    """

    runner: ModelRunner
    memory: PageMemory
    identity: SetIdentity
    vocab_size: int
    max_model_len: int
    num_pages: int
    num_row_snapshots: int
    plan_lead: int
    facts: tuple[tuple[str, str], ...]
    max_drafts: int = 0

    @property
    def geometry(self) -> Sequence[Geometry]:
        """Every rank's."""
        return self.identity.geometries


def open_model(
    config: RunConfig, group: ControlGroup, *, agree_pages: Callable[[int], int], report: StageReport
) -> RankModel:
    """This rank's part of the model. Blocks on the disk, and for the other ranks.

    ``agree_pages`` turns the number of pages that fit here into the one that fits everywhere.

    Raises:
        UsageError and its kinds: the model cannot be read, or the settings do not fit it.
    """
    directory = Path(config.model or "")
    if is_oracle(directory):
        model = _open_oracle(config, directory, group, agree_pages)
    else:
        report("loading torch")
        from flare_cli.torch_wiring import open_torch

        model = open_torch(config, directory, group, agree_pages=agree_pages, report=report)
    return replace(model, runner=with_failpoints(model.runner))


def is_oracle(directory: Path) -> bool:
    """Whether the directory holds flare's own test model, which needs no torch."""
    from flare_cli.model_source import ORACLE_MODEL_TYPE
    from flare_cli.text.generation_config import read_model_config

    return read_model_config(directory).get("model_type") == ORACLE_MODEL_TYPE


def _open_oracle(
    config: RunConfig, directory: Path, group: ControlGroup, agree_pages: Callable[[int], int]
) -> RankModel:
    from flare_core.testing.oracle_config import load_oracle_config
    from flare_core.testing.oracle_memory import OracleMemory
    from flare_core.testing.oracle_runner import OracleRunner

    if config.speculative_config is not None:
        msg = "--speculative-config: flare's test model drafts nothing; leave it out"
        raise UsageError(msg)
    model = load_oracle_config(directory)
    identity = model.identity(config.world_size, config.page_tokens)
    geometry = identity.geometries[config.rank]
    length = model_length(
        config, min(model.max_position_embeddings, ORACLE_MAX_MODEL_LEN), model.max_position_embeddings
    )
    num_pages = agree_pages(
        num_pages_for(
            config.kv_memory,
            identity.geometries,
            default_bytes=ORACLE_POOL_BYTES,
            capacity_bytes=host_memory_bytes(),
        )
    )
    num_snapshots = 2 * config.max_sequences if geometry.row_bytes else 0
    memory = OracleMemory(geometry, num_pages=num_pages, num_row_slots=config.max_sequences + num_snapshots)
    return RankModel(
        runner=OracleRunner(model, memory, group),
        memory=memory,
        identity=identity,
        vocab_size=model.vocab_size,
        max_model_len=length,
        num_pages=num_pages,
        num_row_snapshots=num_snapshots,
        plan_lead=1,
        facts=(("model", "flare's oracle (a test model of bytes)"), pool_fact(num_pages, identity)),
    )


def num_pages_for(
    asked: KvMemory | None, geometries: Sequence[Geometry], *, default_bytes: int, capacity_bytes: int
) -> int:
    """Pages of a pool: as asked for, or as many as ``default_bytes`` hold on the rank with the largest pages.

    Raises:
        UsageError: fewer than two, or more than ``capacity_bytes``, the memory that the device has at all.
    """
    largest = max(geometry.page_bytes for geometry in geometries)
    if asked is not None and asked.num_pages is not None:
        num_pages = asked.num_pages
    else:
        num_bytes = default_bytes if asked is None or asked.num_bytes is None else asked.num_bytes
        num_pages = num_bytes // largest
    if num_pages < 2:
        msg = f"--kv-memory {asked} holds {num_pages} pages of {format_size(largest)}; give more"
        raise UsageError(msg)
    if num_pages * largest > capacity_bytes:
        msg = (
            f"--kv-memory {asked} takes {format_size(num_pages * largest)} on the largest rank, more than the "
            f"{format_size(capacity_bytes)} of memory that its device has; give less"
        )
        raise UsageError(msg)
    return num_pages


def host_memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def model_length(config: RunConfig, default: int, most: int) -> int:
    """Tokens a sequence may have; raises ``UsageError`` where more are asked for than the model takes."""
    if config.max_model_len is None:
        return default
    if config.max_model_len > most:
        msg = f"--max-model-len {config.max_model_len} is more than the model's {most}"
        raise UsageError(msg)
    return config.max_model_len


def pool_fact(num_pages: int, identity: SetIdentity) -> tuple[str, str]:
    """A line about the pool, for people."""
    sizes = sorted({geometry.page_bytes * num_pages for geometry in identity.geometries})
    shown = " to ".join(format_size(size) for size in ([sizes[0], sizes[-1]] if len(sizes) > 1 else sizes))
    return "KV pool", f"{num_pages} pages of {identity.page_tokens} tokens, {shown} a rank"


def export_model(directory: Path, *, world_size: int, output: Path, dtype: str | None, report: StageReport) -> None:
    """Write a package; ``dtype`` converts the weights. See ``flare_core.compute.export``.

    Raises:
        UsageError and its kinds: the model cannot be read or divided, or the output exists.
    """
    from flare_core.compute.export import export_package
    from flare_core.compute.identity import default_digest_cache

    export_package(directory, world_size, output, dtype=dtype, digest_cache=default_digest_cache(), progress=report)
