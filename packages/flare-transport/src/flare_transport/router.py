"""Which consumer receives which frame type of one link, and who is told of its end. Knows no socket and no thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from flare_transport.errors import LocalProtocolError
from flare_transport.frame_types import BYE, HEARTBEAT
from flare_transport.framing import Frame, FrameType

__all__ = ["EndCause", "EndListener", "LinkEnd", "Receiver", "Router"]

if TYPE_CHECKING:
    from flare_transport.link import Link


class EndCause(Enum):
    """Why a link ended."""

    CLOSED_HERE = "closed here"
    CLOSED_BY_PEER = "closed by the other side"
    DISCONNECTED = "disconnected"
    PROTOCOL = "protocol fault of the other side"
    SILENT = "no heartbeat"
    FAILED_HERE = "failed here"
    RECEIVER_RAISED = "a receiver raised"


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """The one end of a link: its cause and a sentence for a person."""

    cause: EndCause
    detail: str

    @property
    def is_loss(self) -> bool:
        """Whether the link broke, as opposed to being closed in order by either side."""
        return self.cause not in {EndCause.CLOSED_HERE, EndCause.CLOSED_BY_PEER}


Receiver: TypeAlias = Callable[["Link", memoryview], None]
EndListener: TypeAlias = Callable[["Link", LinkEnd], None]


class Router:
    """Routes of one link. Declare each before the other side may send such a frame: an unrouted type ends the link.

    Receivers and end listeners run on the link's I/O thread and must not block. A receiver that raises ends the link.
    """

    def __init__(self) -> None:
        # The link itself takes these two; a heartbeat goes on to a receiver if there is one.
        self._types: dict[int, FrameType] = {HEARTBEAT.code: HEARTBEAT, BYE.code: BYE}
        self._receivers: dict[int, Receiver] = {}
        self._listeners: list[EndListener] = []

    @property
    def types(self) -> Mapping[int, FrameType]:
        """The routed types by code; live."""
        return self._types

    def route(self, frame_type: FrameType, receiver: Receiver) -> None:
        """Deliver frames of this type to `receiver(link, payload)`; raises `LocalProtocolError` if it is taken."""
        if frame_type.code in self._receivers or frame_type.code == BYE.code:
            raise LocalProtocolError(f"frame code {frame_type.code} ({frame_type.name}) is taken on this link")
        self._receivers[frame_type.code] = receiver
        self._types[frame_type.code] = frame_type

    def on_end(self, listener: EndListener) -> None:
        """Call `listener(link, end)` once, when the link has ended for whatever cause, in the order added."""
        self._listeners.append(listener)

    def deliver(self, link: Link, frame: Frame) -> None:
        """Hand a frame to its receiver."""
        receiver = self._receivers.get(frame.type.code)
        if receiver is not None:
            receiver(link, frame.payload)

    def ended(self, link: Link, end: LinkEnd) -> None:
        """Tell every listener."""
        for listener in self._listeners:
            listener(link, end)
