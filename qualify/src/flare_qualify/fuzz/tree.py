"""Changes inside a decoded message or JSON document: what a byte-wise mutation would only seldom reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flare_qualify.fuzz.choices import Choices

__all__ = ["ODD_VALUES", "changed", "places"]

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    -1,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.0,
    -0.5,
    1e308,
    "",
    "a",
    "\u0000",
    "é\U0001f525" * 40,
    "x" * 5000,
    b"",
    b"\x00" * 16,
    b"\xff" * 32,
    b"z" * 5000,
    [],
    {},
    [[]],
    [None] * 300,
    {"a": {"a": {}}},
    {str(number): number for number in range(40)},
)
"""Values of every type and at every edge."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside ``value``, itself first."""
    yield path
    match value:
        case dict():
            for key in value:
                yield from places(value[key], (*path, key))
        case list() | tuple():
            for index, item in enumerate(value):
                yield from places(item, (*path, index))


def changed(value: Any, choices: Choices, odd: tuple[Any, ...] = ODD_VALUES) -> Any:
    """``value`` with one place in it replaced, removed, doubled, swapped with another, or nested."""
    every = list(places(value))
    path = choices.pick(every)
    way = choices.integer(0, 7)
    if way == 5:
        return _set(value, path, _at(value, choices.pick(every)))
    if way == 6 and path:
        return _set(value, path[:-1], _without(_at(value, path[:-1]), path[-1]))
    if way == 7:
        return _set(value, path, _more(_at(value, path), choices, odd))
    return _set(value, path, _near(_at(value, path), choices) if way == 4 else choices.pick(odd))


def _near(value: Any, choices: Choices) -> Any:
    """A value of the same type close to this one."""
    match value:
        case bool() | None:
            return not value
        case int():
            return value + choices.pick((-1, 1, 2, 256, -256))
        case str():
            return value[: choices.integer(0, len(value))] + choices.pick(("", "a", "\u00e9", '"', "\\"))
        case bytes():
            at = choices.integer(0, len(value))
            piece = choices.piece(8)
            return value[:at] + piece + (value[at + len(piece) :] if choices.flag() else b"")
        case list() | tuple():
            return [*value[: choices.integer(0, len(value))]]
    return value


def _more(value: Any, choices: Choices, odd: tuple[Any, ...]) -> Any:
    """One item more in a container, or a container around a value, up to very deep."""
    match value:
        case dict():
            return {**value, choices.pick(("a", "", "extra")): choices.pick(odd)}
        case list() | tuple():
            return [*value, choices.pick([*value, *odd])]
    for _ in range(choices.pick((1, 2, 30, 100))):
        value = [value]
    return value


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def _without(value: Any, step: Any) -> Any:
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key != step}
    return [item for index, item in enumerate(value) if index != step]


def _set(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of ``value`` with ``new`` at ``path``."""
    if not path:
        return new
    step, *rest = path
    if isinstance(value, dict):
        return {key: _set(item, tuple(rest), new) if key == step else item for key, item in value.items()}
    return [_set(item, tuple(rest), new) if index == step else item for index, item in enumerate(value)]
