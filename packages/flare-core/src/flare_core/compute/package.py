"""Packages: a model sliced for the ranks of one world size, with a manifest of digests.

Owns the manifest and its verification. A package's identity is its source model's, unless the export changed the
weights' values (a narrower dtype), which gives an identity of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flare_core.compute.identity import Progress, file_digests
from flare_core.errors import CheckpointError

__all__ = ["FORMAT", "MANIFEST", "Manifest", "OpenedPackage", "PackageFile", "is_package", "open_package"]

MANIFEST = "manifest.json"
FORMAT = "flare/package/1"


class PackageFile(msgspec.Struct, frozen=True):
    """One file of a package: its name, size and SHA-256 in hex."""

    name: str
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """``manifest.json``: what the package was made from and for.

    Attributes:
        format: :data:`FORMAT`.
        model_identity: hex of the 32 bytes that name the model.
        world_size: number of ranks; ``ranks[r]`` is rank r's weight file.
        dtype: dtype of the weights, or "stored" where they are as the source had them.
        config: digest of ``config.json``.
    """

    format: str
    model_identity: str
    world_size: int
    dtype: str
    config: PackageFile
    ranks: tuple[PackageFile, ...]


@dataclass(frozen=True, slots=True)
class OpenedPackage:
    """A verified package as one rank sees it."""

    identity: bytes
    rank_file: Path


def is_package(model_dir: Path) -> bool:
    """Whether ``model_dir`` is a package and not a Hugging Face directory."""
    return (model_dir / MANIFEST).exists()


def open_package(
    package_dir: Path,
    rank: int,
    world_size: int,
    *,
    digest_cache: Path | None = None,
    progress: Progress | None = None,
) -> OpenedPackage:
    """Check the manifest and the digests of the config and of ``rank``'s file (cached like any digests).

    Raises:
        CheckpointError: another format or world size, or a file that is missing, truncated or changed.
    """
    manifest = _read_manifest(package_dir / MANIFEST)
    if manifest.world_size != world_size:
        raise CheckpointError(
            f"{package_dir} was exported for world size {manifest.world_size}, not {world_size}; "
            "start as many ranks, or export it again"
        )
    files = (manifest.config, manifest.ranks[rank])
    for file in files:
        path = package_dir / file.name
        if not path.exists():
            raise CheckpointError(f"{path} is missing; the manifest names it")
        if path.stat().st_size != file.num_bytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, the manifest says {file.num_bytes}")
    paths = [package_dir / file.name for file in files]
    for path, file, digest in zip(
        paths, files, file_digests(paths, cache=digest_cache, progress=progress), strict=True
    ):
        if digest.hex() != file.sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is {digest.hex()}, the manifest says {file.sha256}")
    return OpenedPackage(bytes.fromhex(manifest.model_identity), paths[1])


def _read_manifest(path: Path) -> Manifest:
    try:
        data = path.read_bytes()
        if json.loads(data).get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {json.loads(data).get('format')!r}, not {FORMAT!r}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a package manifest: {error}") from error
    names = [file.name for file in (manifest.config, *manifest.ranks)]
    if any(Path(name).name != name for name in names) or len(manifest.ranks) != manifest.world_size:
        raise CheckpointError(f"{path} is not a package manifest: it names {len(manifest.ranks)} rank files")
    return manifest
