"""What a rendezvous needs to know and what it reports. Values only."""

from collections.abc import Callable
from dataclasses import dataclass, field

from flare_transport.address import Address
from flare_transport.greeting import GreetingSettings
from flare_transport.handshake_messages import Security
from flare_transport.link import LinkSettings

__all__ = ["Observer", "RendezvousSettings", "Sighting"]


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """How one rank takes its place. `address` is where rank zero listens; `key` is the 32-byte cluster key.

    `deadline_seconds` bounds the whole rendezvous; `greeting` bounds each single connection.
    """

    address: Address
    rank: int
    world_size: int
    key: bytes = field(repr=False)
    security: Security = Security.TLS
    deadline_seconds: float = 600.0
    greeting: GreetingSettings = field(default_factory=GreetingSettings)
    link: LinkSettings = field(default_factory=LinkSettings)


@dataclass(frozen=True, slots=True)
class Sighting:
    """Something that happened at the rendezvous, for a log: who joined, who was turned away and why.

    `rank` is None where the other side did not say, or did not prove, which it is.
    """

    source: str
    rank: int | None
    detail: str
    has_joined: bool = False


Observer = Callable[[Sighting], None]
