"""Which reason for giving a group up the end of a link is. Values only."""

from __future__ import annotations

from flare_core.errors import PoisonReason
from flare_transport.router import EndCause, LinkEnd

__all__ = ["loss_of"]

_REASONS = {
    EndCause.SILENT: PoisonReason.SILENT,
    EndCause.PROTOCOL: PoisonReason.PROTOCOL,
    EndCause.RECEIVER_RAISED: PoisonReason.INTERNAL,
}


def loss_of(end: LinkEnd) -> PoisonReason:
    """The reason; a link that broke, or was ended by either side while it was needed, is lost."""
    return _REASONS.get(end.cause, PoisonReason.LINK_LOST)
