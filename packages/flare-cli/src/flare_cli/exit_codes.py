"""The code that a process ends with for a fault. Owns the table; ``docs/operations.md`` says what to do for each."""

from __future__ import annotations

from flare_core.errors import ConfigurationMismatch, FlareError, UsageError
from flare_transport import AddressError, KeyFileError, RendezvousError, RendezvousRefused, TransportError

__all__ = ["EXIT_LOST", "EXIT_NOT_MET", "exit_code_of"]

EXIT_LOST = 70
"""The group is lost, or was never whole (``EX_SOFTWARE``)."""
EXIT_NOT_MET = 75
"""The ranks have not met in time (``EX_TEMPFAIL``): nothing is wrong with this one, and trying again may help."""


def exit_code_of(error: FlareError | TransportError) -> int:
    """The code for an error that ends the process."""
    match error:
        case FlareError():
            return error.exit_code
        case RendezvousRefused():
            return ConfigurationMismatch.exit_code
        case RendezvousError():
            return EXIT_NOT_MET
        case AddressError() | KeyFileError():
            return UsageError.exit_code
        case TransportError():
            return EXIT_LOST
