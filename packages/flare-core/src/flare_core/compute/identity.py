"""The identity of a model: SHA-256 over its config and weight files, with the files' digests cached.

Owns the list of a directory's weight files and the digest cache. Loads no torch and reads no tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flare_core.errors import CheckpointError

__all__ = ["Progress", "default_digest_cache", "file_digests", "model_identity", "weight_files"]

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all); from the calling thread, often."""

_BLOCK_BYTES = 8 << 20


def default_digest_cache(environ: Mapping[str, str] | None = None) -> Path:
    """Where digests are kept between starts: ``$XDG_CACHE_HOME/flare/digests.json`` (default ``~/.cache``)."""
    values = os.environ if environ is None else environ
    root = values.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "flare" / "digests.json"


def weight_files(model_dir: Path) -> list[str]:
    """Names of the safetensors files of a Hugging Face directory, sorted.

    Raises:
        CheckpointError: none there, an unreadable index, or a file that the index names is missing.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        return sorted(set(weight_map(model_dir).values()))
    if (model_dir / "model.safetensors").exists():
        return ["model.safetensors"]
    raise CheckpointError(f"{model_dir} holds neither model.safetensors nor model.safetensors.index.json")


def weight_map(model_dir: Path) -> Mapping[str, str]:
    """Tensor name to file name, of a directory with an index file.

    Raises:
        CheckpointError: as for :func:`weight_files`.
    """
    index = model_dir / "model.safetensors.index.json"
    try:
        mapping = json.loads(index.read_bytes())["weight_map"]
        files = set(mapping.values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    for name in sorted(files):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it")
        if not (model_dir / name).exists():
            raise CheckpointError(f"{index} names {name}, which is missing in {model_dir}")
    return {str(tensor): str(name) for tensor, name in mapping.items()}


def model_identity(model_dir: Path, *, cache: Path | None = None, progress: Progress | None = None) -> bytes:
    """32 bytes that name the model in ``model_dir``, a Hugging Face directory. Reads every weight file once.

    ``cache`` (default :func:`default_digest_cache`) keeps digests by device, inode, size, mtime and ctime.

    Raises:
        CheckpointError: no config, no weights, or a missing shard.
    """
    names = ["config.json", *weight_files(model_dir)]
    if not (model_dir / "config.json").exists():
        raise CheckpointError(f"{model_dir / 'config.json'} does not exist; give a Hugging Face model directory")
    digests = file_digests([model_dir / name for name in names], cache=cache, progress=progress)
    whole = hashlib.sha256(b"flare/model/1")
    for name, digest in zip(names, digests, strict=True):
        whole.update(len(name).to_bytes(4, "little") + name.encode() + digest)
    return whole.digest()


def file_digests(paths: Sequence[Path], *, cache: Path | None = None, progress: Progress | None = None) -> list[bytes]:
    """SHA-256 of each file, from the cache where the file is unchanged since it was read."""
    cache_path = default_digest_cache() if cache is None else cache
    known = _load_cache(cache_path)
    total = sum(path.stat().st_size for path in paths)
    done = 0
    digests: list[bytes] = []
    fresh: dict[str, str] = {}
    for path in paths:
        stamp = _stamp(path)
        if stamp in known:
            digests.append(bytes.fromhex(known[stamp]))
        else:
            digests.append(_digest(path, done, total, progress))
            if _stamp(path) == stamp:  # a file that changed while it was read is not remembered
                fresh[stamp] = digests[-1].hex()
        done += path.stat().st_size
    if fresh:
        _save_cache(cache_path, fresh)
    return digests


def _digest(path: Path, done: int, total: int, progress: Progress | None) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(f"reading {path.name}", done, total)
    return digest.digest()


def _stamp(path: Path) -> str:
    status = path.stat()
    fields = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, fields))


def _load_cache(path: Path) -> dict[str, str]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {key: item for key, item in value.items() if isinstance(item, str) and len(item) == 64}


def _save_cache(path: Path, fresh: Mapping[str, str]) -> None:
    """Merge and replace atomically; a cache that cannot be written costs a reading at the next start, no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = _load_cache(path) | dict(fresh)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(merged, file)
        Path(file.name).replace(path)
    except OSError:
        return
