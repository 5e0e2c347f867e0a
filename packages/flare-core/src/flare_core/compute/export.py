"""``flare export``: slices a Hugging Face directory once, so that ranks read whole small files.

The package appears under its name only when it is complete: it is written beside it and renamed.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from flare_core.compute.checkpoint import open_checkpoint
from flare_core.compute.identity import Progress
from flare_core.compute.package import FORMAT, MANIFEST, Manifest, PackageFile, is_package
from flare_core.compute.tensor_layout import rank_shard, tensor_slices
from flare_core.errors import CheckpointError, UsageError

__all__ = ["export_package"]

_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_package(
    model_dir: Path,
    world_size: int,
    out_dir: Path,
    *,
    dtype: str | None = None,
    digest_cache: Path | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write a package for ``world_size`` ranks to ``out_dir``, which must not exist. Blocks until it is complete.

    ``dtype`` ("float32" or "bfloat16") converts the weights; by default they stay as they are stored.

    Raises:
        UsageError: ``out_dir`` exists, an unknown dtype, or the model cannot be divided so.
        CheckpointError, UnsupportedModel: the model cannot be read.
    """
    if out_dir.exists():
        raise UsageError(f"{out_dir} exists already; give a new directory")
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known; use {' or '.join(_DTYPES)}")
    if is_package(model_dir):
        raise CheckpointError(f"{model_dir} is a package already; export from the Hugging Face directory")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        manifest = _fill(model_dir, world_size, staging, dtype=dtype, digest_cache=digest_cache, progress=progress)
        staging.chmod(0o755)
        staging.rename(out_dir)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return manifest


def _fill(
    model_dir: Path,
    world_size: int,
    staging: Path,
    *,
    dtype: str | None,
    digest_cache: Path | None,
    progress: Progress | None,
) -> Manifest:
    checkpoint = open_checkpoint(model_dir, 0, 1, digest_cache=digest_cache, progress=progress)
    for name in _COMPANIONS:
        if (model_dir / name).exists():
            shutil.copyfile(model_dir / name, staging / name)
    config = checkpoint.config
    lossy = False
    ranks: list[PackageFile] = []
    for rank in range(world_size):
        tensors: dict[str, torch.Tensor] = {}
        for part in tensor_slices(config, rank_shard(config, rank, world_size)):
            stored = checkpoint.read(part)
            converted = stored if dtype is None else stored.to(_DTYPES[dtype])
            lossy = lossy or (converted.dtype != stored.dtype and dtype != "float32")
            tensors[part.name] = converted
        name = f"rank-{rank}-of-{world_size}.safetensors"
        save_file(tensors, staging / name)
        ranks.append(_describe(staging / name))
        if progress is not None:
            progress(f"writing {name}", rank + 1, world_size)
    manifest = Manifest(
        format=FORMAT,
        model_identity=_identity(checkpoint.identity, dtype if lossy else None).hex(),
        world_size=world_size,
        dtype=dtype or "stored",
        config=_describe(staging / "config.json"),
        ranks=tuple(ranks),
    )
    (staging / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


def _identity(source: bytes, lossy_dtype: str | None) -> bytes:
    """The source's identity, or one of its own for weights that are no longer the source's values."""
    if lossy_dtype is None:
        return source
    return hashlib.sha256(b"flare/model/converted/1" + source + lossy_dtype.encode()).digest()


def _describe(path: Path) -> PackageFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return PackageFile(path.name, path.stat().st_size, digest.hexdigest())
