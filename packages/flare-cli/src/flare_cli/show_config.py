"""Prints a configuration with the origin of each value, and the split of a model over ranks. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flare_cli.resolve import Resolved
from flare_cli.settings import RUN_SETTINGS
from flare_cli.text.generation_config import read_model_config
from flare_core.errors import UnsupportedModel
from flare_core.sharding import Span, split_heads, split_mlp, split_vocab

__all__ = ["model_split", "print_resolved", "print_split"]


def print_resolved(resolved: Resolved) -> None:
    """Print a table: setting, value, origin."""
    table = Table("setting", "value", "from")
    for setting in RUN_SETTINGS:
        value = getattr(resolved.config, setting.name)
        table.add_row(setting.key, "-" if value is None else setting.show(value), resolved.origins[setting.name])
    console = Console()
    console.print(table)
    for name in resolved.unknown:
        console.print(f"{name} is set and is no setting of flare", highlight=False)


def print_split(model: str, world_size: int) -> None:
    """Print what each rank holds of the model; raises as :func:`model_split`."""
    table = Table("rank", "KV heads", "query heads", "MLP columns", "vocabulary ids", title_justify="left")
    table.title = f"{model} on {world_size} rank{'s' if world_size > 1 else ''}"
    for row in model_split(Path(model), world_size):
        table.add_row(*row)
    Console().print(table)


def model_split(directory: Path, world_size: int) -> list[tuple[str, str, str, str, str]]:
    """For every rank: its number, KV heads, query heads, MLP columns, vocabulary ids, as half-open ranges.

    Raises:
        CheckpointError, UnsupportedModel: no model there, or its config lacks what the split needs.
        UsageError: the model cannot be divided over so many ranks.
    """
    values = read_model_config(directory)
    num_heads = _count(values, "num_attention_heads", directory)
    num_kv_heads = _count(values, "num_key_value_heads", directory, default=num_heads)
    heads = split_heads(num_heads, num_kv_heads, world_size)
    columns = split_mlp(_count(values, "intermediate_size", directory, default=0), world_size)
    ids = split_vocab(_count(values, "vocab_size", directory), world_size)
    return [
        (str(rank), _range(shard.kv), _range(shard.query), _range(columns[rank]), _range(ids[rank]))
        for rank, shard in enumerate(heads)
    ]


def _count(values: Mapping[str, Any], name: str, directory: Path, *, default: int | None = None) -> int:
    value = values.get(name, default)
    if not isinstance(value, int):
        msg = f"{directory}/config.json: {name} is missing or no number; flare cannot tell how to divide this model"
        raise UnsupportedModel(msg)
    return value


def _range(span: Span) -> str:
    return f"{span.start}-{span.stop - 1} ({len(span)})" if len(span) else "none"
