"""What a model directory says about generation: sampling defaults, all end-of-sequence ids, context length.

Reads ``generation_config.json`` and ``config.json``. Knows no request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flare_core.errors import CheckpointError

__all__ = ["GenerationDefaults", "load_generation_defaults", "read_model_config"]

MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for fields that a request leaves out.

    Attributes:
        eos_token_ids: every id that ends an output.
        max_position_embeddings: the model's own context length, or None where it says nothing.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_position_embeddings: int | None = None


def read_model_config(directory: Path) -> Mapping[str, Any]:
    """``config.json`` of a model directory or package.

    Raises:
        CheckpointError: missing, too large, or not a JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        msg = f"{directory}: not a model directory (no config.json in it)"
        raise CheckpointError(msg)
    return _read(path)


def load_generation_defaults(directory: Path) -> GenerationDefaults:
    """The defaults in a model directory; raises as :func:`read_model_config`, and for values of the wrong kind."""
    config = read_model_config(directory)
    path = directory / "generation_config.json"
    generation = _read(path) if path.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(value, int) and value >= 0 for value in ids):
        msg = f"{path}: eos_token_id must be an id or a list of ids, found {eos!r}"
        raise CheckpointError(msg)
    length = config.get("max_position_embeddings")
    return GenerationDefaults(
        eos_token_ids=tuple(ids),
        temperature=_number(generation, "temperature", 1.0, path),
        top_k=int(_number(generation, "top_k", 0, path)),
        top_p=_number(generation, "top_p", 1.0, path),
        min_p=_number(generation, "min_p", 0.0, path),
        repetition_penalty=_number(generation, "repetition_penalty", 1.0, path),
        max_position_embeddings=length if isinstance(length, int) else None,
    )


def _number(values: Mapping[str, Any], name: str, default: float, path: Path) -> float:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 31:
        msg = f"{path}: {name} must be a number that is not negative, found {value!r}"
        raise CheckpointError(msg)
    return float(value)


def _read(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        msg = f"{path}: larger than {MAX_CONFIG_BYTES} bytes"
        raise CheckpointError(msg)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path}: not JSON: {error}"
        raise CheckpointError(msg) from None
    if not isinstance(value, dict):
        msg = f"{path}: not a JSON object"
        raise CheckpointError(msg)
    return value
