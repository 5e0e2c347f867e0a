"""Reading weights: a Hugging Face directory of safetensors, or a package that was sliced for the ranks before.

Owns files, headers and slices. Files are memory-mapped, and a rank reads only its own slices. Knows nothing of
what the tensors are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from flare_core.compute.identity import Progress, model_identity, weight_files, weight_map
from flare_core.compute.model_config import ModelConfig, read_config
from flare_core.compute.package import is_package, open_package
from flare_core.compute.tensor_layout import TensorSlice
from flare_core.errors import CheckpointError
from flare_core.sharding import Span

__all__ = ["Checkpoint", "open_checkpoint"]

_FLOATS = frozenset({"F32", "F16", "BF16"})


class Checkpoint:
    """An open model as one rank reads it. Not thread-safe.

    Attributes:
        config: what the model is.
        identity: 32 bytes; equal for a directory and the packages exported from it without loss.
    """

    def __init__(
        self, config: ModelConfig, identity: bytes, *, files: Mapping[str, Path], is_sliced: bool, origin: Path
    ) -> None:
        self.config = config
        self.identity = identity
        self._files = files
        self._is_sliced = is_sliced
        self._origin = origin
        self._open: dict[Path, Any] = {}

    def read(self, part: TensorSlice) -> torch.Tensor:
        """The part, contiguous, on the CPU, in the dtype it is stored in (float32, bfloat16 or float16).

        Raises:
            CheckpointError: the tensor is missing, has another shape, or holds no floats; names file and tensor.
        """
        path = self._files.get(part.name)
        if path is None:
            raise CheckpointError(f"{self._origin} has no tensor {part.name}")
        view = open_file(path, self._open).get_slice(part.name)
        expected = part.sliced_shape if self._is_sliced else part.shape
        found = tuple(view.get_shape())
        if found != expected:
            raise CheckpointError(f"{path}: tensor {part.name} has shape {found}, not {expected}")
        if view.get_dtype() not in _FLOATS:
            raise CheckpointError(f"{path}: tensor {part.name} holds {view.get_dtype()}; only F32, BF16 and F16 do")
        if 0 in part.sliced_shape:
            return torch.empty(part.sliced_shape)
        spans = [Span(0, size) for size in found] if self._is_sliced else part.spans
        tensor = view[tuple(slice(span.start, span.stop) for span in spans)]
        return tensor.contiguous()  # type: ignore[no-any-return]


def open_checkpoint(
    model_dir: Path,
    rank: int,
    world_size: int,
    *,
    digest_cache: Path | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Open a Hugging Face directory or a package for one rank. Blocks while digests are computed the first time.

    Raises:
        CheckpointError: a missing, truncated or foreign file, or a package made for another world size.
        UnsupportedModel: the model is not one flare implements.
    """
    config = read_config(model_dir)
    if is_package(model_dir):
        package = open_package(model_dir, rank, world_size, digest_cache=digest_cache, progress=progress)
        names = tensor_names(package.rank_file)
        files = dict.fromkeys(names, package.rank_file)
        return Checkpoint(config, package.identity, files=files, is_sliced=True, origin=model_dir)
    files = directory_files(model_dir)
    identity = model_identity(model_dir, cache=digest_cache, progress=progress)
    return Checkpoint(config, identity, files=files, is_sliced=False, origin=model_dir)


def directory_files(model_dir: Path) -> dict[str, Path]:
    """Tensor name to file, of a Hugging Face directory; every file's header is checked against its size."""
    names = weight_files(model_dir)
    found = {name: set(tensor_names(model_dir / name)) for name in names}
    if (model_dir / "model.safetensors.index.json").exists():
        files: dict[str, Path] = {}
        for tensor, name in weight_map(model_dir).items():
            if tensor not in found[name]:
                raise CheckpointError(f"{model_dir / name} has no tensor {tensor}, which the index places there")
            files[tensor] = model_dir / name
        return files
    return {tensor: model_dir / name for name in names for tensor in found[name]}


def tensor_names(path: Path) -> list[str]:
    """Names in one safetensors file."""
    return list(open_file(path, {}).keys())


def open_file(path: Path, opened: dict[Path, Any]) -> Any:
    """The memory-mapped file, opened once per ``opened``.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """
    if path not in opened:
        try:
            opened[path] = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is truncated or not a safetensors file: {error}") from error
    return opened[path]
