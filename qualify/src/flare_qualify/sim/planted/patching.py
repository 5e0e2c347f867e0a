"""How a bug is planted: an attribute of a class or module is exchanged, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

__all__ = ["PlantedBug", "exchange"]


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A bug.

    Attributes:
        name: on the command line.
        breaks: the rule that it breaks, in a sentence.
        plant: the bug is there while this context lasts.
    """

    name: str
    breaks: str
    plant: Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def exchange(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set (owner, attribute name, value), and set back what was there."""
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
