"""What a fuzz target is: a function of bytes that raises when a rule is broken. Knows no loop and no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

__all__ = ["Execute", "Target", "Violation", "require"]

Execute = Callable[[bytes], None]


class Violation(Exception):
    """The code under test broke the rule that the target states."""


def require(is_kept: bool, broken: str) -> None:
    """Raise ``Violation(broken)`` unless the rule is kept. Not an assertion: it holds under ``python -O`` too."""
    if not is_kept:
        raise Violation(broken)


@dataclass(frozen=True, slots=True)
class Target:
    """One fuzz target.

    Attributes:
        name: on the command line, and of its directory in the corpus.
        proves: the rule, in one sentence.
        open: makes what executions share, and gives the function that one execution calls. Whatever that function
            raises is a finding.
        seeds: inputs to start from, beside the corpus.
        words: pieces of bytes that mutations insert.
        max_bytes: longest input.
    """

    name: str
    proves: str
    open: Callable[[], AbstractContextManager[Execute]]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[bytes, ...] = ()
    max_bytes: int = 4096
