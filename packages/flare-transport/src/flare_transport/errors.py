"""The faults that this package raises; owns their names, knows nothing of what raises them.

A `LocalProtocolError` is a mistake of the caller, found before anything was sent. A `RemoteProtocolError` is a mistake
of the other side: its connection cannot be trusted any further. All are `TransportError`s.
"""

__all__ = [
    "AddressError",
    "CertificateError",
    "KeyFileError",
    "KeyValueError",
    "KeyValueTimeoutError",
    "LinkLost",
    "LocalProtocolError",
    "QueueFull",
    "RemoteProtocolError",
    "RendezvousError",
    "RendezvousRefused",
    "SecondLinkError",
    "ServiceRefused",
    "TransportError",
    "VersionMismatchError",
]


class TransportError(Exception):
    """A fault of a link, a handshake or a setting of this package."""


class LocalProtocolError(TransportError):
    """The caller asked for what the protocol does not allow; nothing was sent."""


class RemoteProtocolError(TransportError):
    """The other side sent what the protocol does not allow."""


class VersionMismatchError(RemoteProtocolError):
    """The other side's frames carry another framing version.

    Attributes: `expected` and `received` are the two versions.
    """

    def __init__(self, expected: int, received: int) -> None:
        super().__init__(f"the other side frames by version {received}; this flare frames by version {expected}")
        self.expected = expected
        self.received = received


class QueueFull(TransportError):
    """A link's bounded queue cannot take the frame: the other side reads too slowly or not at all. Nothing was sent."""


class LinkLost(TransportError):
    """The link has ended, so what was asked of it cannot be answered."""


class KeyFileError(TransportError):
    """A key file is missing, malformed, or readable by others; the message says which and the remedy."""


class AddressError(TransportError):
    """An address cannot be parsed, resolved or bound; the message names it and the remedy."""


class CertificateError(TransportError):
    """The other side's TLS certificate is not the one that the handshake authenticated, or TLS failed."""


class RendezvousError(TransportError):
    """The ranks did not meet: refused, wrong key, or missing when the deadline passed; the message says who and why."""


class RendezvousRefused(RendezvousError):
    """Rank zero will not have this rank as it was started: its key, world size, rank, version or security differs."""


class SecondLinkError(TransportError):
    """A second connection could not be opened or proven in time; the message names the rank and what was seen."""


class ServiceRefused(TransportError):
    """A service will not have this client: another key, version or link security, or it knows no such session."""


class KeyValueError(TransportError):
    """Rank zero's key-value table refused a request (over its limits); the message says which limit."""


class KeyValueTimeoutError(TransportError, TimeoutError):
    """A key was not set before the caller's timeout; the message names the keys."""
