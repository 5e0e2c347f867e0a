"""Errors that every package shares, each with the exit code a process ends with when nobody handles it.

A user's mistake is a :class:`UsageError` (exit 2); settings on which ranks disagree are a
:class:`ConfigurationMismatch` (exit 78, ``EX_CONFIG``); a fault that voids what ranks know of each other is a
:class:`Poisoned` (exit 70, ``EX_SOFTWARE``). Errors of one request are :class:`RequestError` and never leave it.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CheckpointError",
    "ConfigurationMismatch",
    "FlareError",
    "Poisoned",
    "RequestError",
    "UnsupportedModel",
    "UsageError",
]


class FlareError(Exception):
    """What flare raises on purpose; the message names the thing, the value and the remedy."""

    exit_code: ClassVar[int] = 1


class UsageError(FlareError):
    """A flag, file or environment variable that cannot be used as given."""

    exit_code: ClassVar[int] = 2


class CheckpointError(UsageError):
    """A model directory or package with a missing, misshapen or damaged part; names the file and the tensor."""


class UnsupportedModel(UsageError):
    """An architecture or a configuration key that flare does not implement; names it."""


class ConfigurationMismatch(FlareError):
    """Ranks were started with settings that must be equal and are not; names field, ranks and both values."""

    exit_code: ClassVar[int] = 78


class Poisoned(FlareError):
    """Ranks can no longer account for each other's transfers: nothing is reported any more, the process exits."""

    exit_code: ClassVar[int] = 70


class RequestError(FlareError):
    """A request that cannot be served as sent. ``param`` names the field, ``status`` is the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
