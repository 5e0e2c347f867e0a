"""Which model is to be served and where it lies: the one named, or the embedded default. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flare_cli.config import RunConfig
from flare_cli.text.generation_config import read_model_config
from flare_core.errors import UsageError

__all__ = ["ORACLE_MODEL_TYPE", "ModelSource", "find_model"]

ORACLE_MODEL_TYPE = "flare-oracle"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model directory or package; ``is_oracle`` for flare's own test model, which needs no torch."""

    directory: Path
    name: str
    is_oracle: bool


def find_model(config: RunConfig) -> ModelSource:
    """The model that ``config`` names.

    Raises:
        UsageError: no such directory, no model in it, or no default model; says how to get one.
    """
    if config.model is None:
        from flare_cli.model_store import find_default_model

        directory = find_default_model()
        if directory is None:
            msg = "no MODEL given, and the default model is not here yet: fetch it with 'flare model get smollm2'"
            raise UsageError(msg)
    else:
        directory = Path(config.model).expanduser()
        if not directory.is_dir():
            msg = f"{config.model}: no such directory; MODEL is a Hugging Face directory or a package of 'flare export'"
            raise UsageError(msg)
    model_type = read_model_config(directory).get("model_type")
    name = config.served_model_name or directory.resolve().name
    return ModelSource(directory, name, is_oracle=model_type == ORACLE_MODEL_TYPE)
