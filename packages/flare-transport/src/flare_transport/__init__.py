"""Framed, mutually authenticated links between the ranks of a group, and the rendezvous that makes them.

Imports no other part of flare. Nothing here opens a socket, a file or a thread at import; `ssl` and `cryptography` are
loaded when the first certificate is made.
"""

from flare_transport.__about__ import __version__
from flare_transport.address import Address, parse_address
from flare_transport.bulk_unit import BulkUnit, UnitAnswer, UnitOp, UnitStatus, transfer_key
from flare_transport.errors import (
    AddressError,
    CertificateError,
    KeyFileError,
    KeyValueError,
    KeyValueTimeoutError,
    LinkLost,
    LocalProtocolError,
    QueueFull,
    RemoteProtocolError,
    RendezvousError,
    RendezvousRefused,
    SecondLinkError,
    ServiceRefused,
    TransportError,
)
from flare_transport.exchange import StarExchange
from flare_transport.frame_types import FIRST_CONSUMER_CODE, HEARTBEAT
from flare_transport.framing import HEADER_BYTES, Frame, FrameDecoder, FrameType, encode_frame
from flare_transport.greeting import GreetingSettings
from flare_transport.handshake_messages import Security
from flare_transport.key_value import KeyValue, KeyValueService, key_value_over
from flare_transport.keys import derive_key, generate_key, load_key_file, write_key
from flare_transport.link import Link, LinkSettings, LinkState
from flare_transport.liveness import HeartbeatSettings, Liveness
from flare_transport.local_link import local_link
from flare_transport.record_listener import LinkListener, dial_link, open_link_listener
from flare_transport.rendezvous import meet
from flare_transport.rendezvous_settings import RendezvousSettings, Sighting
from flare_transport.router import EndCause, LinkEnd, Router
from flare_transport.second_link import LinkOffer
from flare_transport.service_dial import dial_bulk, dial_service
from flare_transport.service_listener import ServiceListener, open_service
from flare_transport.service_messages import ServiceSession
from flare_transport.session import Group, Peer, PeerIdentity, Session

__all__ = [
    "FIRST_CONSUMER_CODE",
    "HEADER_BYTES",
    "HEARTBEAT",
    "Address",
    "AddressError",
    "BulkUnit",
    "CertificateError",
    "EndCause",
    "Frame",
    "FrameDecoder",
    "FrameType",
    "GreetingSettings",
    "Group",
    "HeartbeatSettings",
    "KeyFileError",
    "KeyValue",
    "KeyValueError",
    "KeyValueService",
    "KeyValueTimeoutError",
    "Link",
    "LinkEnd",
    "LinkListener",
    "LinkLost",
    "LinkOffer",
    "LinkSettings",
    "LinkState",
    "Liveness",
    "LocalProtocolError",
    "Peer",
    "PeerIdentity",
    "QueueFull",
    "RemoteProtocolError",
    "RendezvousError",
    "RendezvousRefused",
    "RendezvousSettings",
    "Router",
    "SecondLinkError",
    "Security",
    "ServiceListener",
    "ServiceRefused",
    "ServiceSession",
    "Session",
    "Sighting",
    "StarExchange",
    "TransportError",
    "UnitAnswer",
    "UnitOp",
    "UnitStatus",
    "__version__",
    "derive_key",
    "dial_bulk",
    "dial_link",
    "dial_service",
    "encode_frame",
    "generate_key",
    "key_value_over",
    "load_key_file",
    "local_link",
    "meet",
    "open_link_listener",
    "open_service",
    "parse_address",
    "transfer_key",
    "write_key",
]
