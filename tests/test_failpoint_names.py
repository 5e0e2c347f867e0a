"""Failpoints: those that are listed are those that the sources come to, and operators can read of each."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from repository import ROOT, shipped

from flare_transport.failpoint import FAILPOINTS


def called_points() -> Iterator[str]:
    """Names given to ``failpoint`` itself, or in a table whose name ends in ``_POINTS``."""
    for source in shipped():
        for node in ast.walk(source.tree):
            match node:
                case ast.Call(func=ast.Name(id="failpoint"), args=[ast.Constant(value=str(name))]):
                    yield name
                case ast.Assign(targets=[ast.Name(id=str(table))], value=ast.Dict(values=values)) if table.endswith(
                    "_POINTS"
                ):
                    yield from (value.value for value in values if isinstance(value, ast.Constant))


def test_every_failpoint_is_come_to_and_every_one_that_is_come_to_is_listed() -> None:
    assert set(called_points()) == {point.name for point in FAILPOINTS}


def test_every_failpoint_stands_in_the_operations_manual() -> None:
    manual = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    # Grouped there as ``store.{begin,create}``.
    listed = set()
    for group in manual.split("`"):
        prefix, brace, rest = group.partition(".{")
        if brace:
            listed |= {f"{prefix}.{name.strip()}" for name in rest.rstrip("}").split(",")}
    missing = [point.name for point in FAILPOINTS if point.name not in listed and f"`{point.name}`" not in manual]
    assert not missing
