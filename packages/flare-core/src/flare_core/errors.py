"""Errors that every package shares, each with the exit code a process ends with when nobody handles it.

A user's mistake is a :class:`UsageError` (exit 2); settings on which ranks disagree are a
:class:`ConfigurationMismatch` (exit 78, ``EX_CONFIG``); a fault that voids what ranks know of each other is a
:class:`Poisoned` (exit 70, ``EX_SOFTWARE``). Errors of one request are :class:`RequestError` and never leave it.
"""

from __future__ import annotations

import enum
from typing import ClassVar

__all__ = [
    "CheckpointError",
    "ConfigurationMismatch",
    "FlareError",
    "PoisonReason",
    "Poisoned",
    "RequestError",
    "UnsupportedModel",
    "UsageError",
    "poison_reason",
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
    """A rank is lost, or can no longer be accounted for: nothing is reported any more, the process exits."""

    exit_code: ClassVar[int] = 70


class PoisonReason(enum.StrEnum):
    """Why a group was given up: a label of ``flare_poisoned_total`` and the message's first word. Never renamed."""

    LINK_LOST = "link-lost"
    """A link between ranks broke, or its other side ended it."""
    SILENT = "silent"
    """A rank sent no heartbeat in time."""
    QUEUE_FULL = "queue-full"
    """A rank does not take what it is sent."""
    DEADLINE = "deadline"
    """A rank did not begin or answer a transfer in time."""
    PROTOCOL = "protocol"
    """A rank said what it cannot say: a foreign run, a job that it was not given, bytes that are no message."""
    UNDO_FAILED = "undo-failed"
    """A failed store could be removed on no rank."""
    DEVICE_FAULT = "device-fault"
    """A device failed under a transfer, which never ends therefore."""
    INTERNAL = "internal"
    """An error that nobody foresaw."""
    WORKER_DIED = "worker-died"
    """The process with the engine ended without a word: killed, or out of memory."""
    PARENT_LOST = "parent-lost"
    """The process that serves HTTP is gone, and its engine ends with it."""
    DRAIN_OVERDUE = "drain-overdue"
    """A peer was told to end, and nobody drained the group."""


def poison_reason(message: str) -> PoisonReason | None:
    """The reason that begins ``message``, or None."""
    try:
        return PoisonReason(message.partition(":")[0])
    except ValueError:
        return None


class RequestError(FlareError):
    """A request that cannot be served as sent. ``param`` names the field, ``status`` is the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
