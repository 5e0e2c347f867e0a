"""A control link whose other side breaks the protocol: it ends, and the reason says what was wrong."""

import queue
import socket

import pytest

from flare_cli.control_group import DRAIN_ASKED, OFFER, ControlGroup
from flare_transport import Group, Link, Peer, PeerIdentity, Security, Session, encode_frame
from flare_transport.frame_types import EXCHANGE_PART, EXCHANGE_WHOLE, KEY_VALUE_REPLY, KEY_VALUE_REQUEST


@pytest.mark.parametrize(
    ("rank", "frame_type", "payload", "says"),
    [
        (1, OFFER, b"\xc0", "an offer of a link cannot be read"),
        (1, OFFER, b"\x91" * 4000, "an offer of a link cannot be read"),
        (1, KEY_VALUE_REPLY, b"\x91" * 5000, "a key-value reply cannot be read"),
        (0, KEY_VALUE_REQUEST, b"\x93\xa3set\x01\xa1k" + b"\x91" * 5000, "a key-value request cannot be read"),
        (0, EXCHANGE_PART, b"short", "shorter than its number"),
        (1, EXCHANGE_WHOLE, b"short", "cut short"),
        (1, DRAIN_ASKED, b"", "is not expected on this link"),
        (0, OFFER, b"", "is not expected on this link"),
    ],
)
def test_a_frame_that_cannot_be_is_named_as_a_fault_of_the_other_side(rank, frame_type, payload, says, caplog):
    near, far = socket.socketpair()
    session = Session(bytes(16), rank, 2, Security.PLAINTEXT, bytes(32), None)
    identity = PeerIdentity(1 - rank, "127.0.0.1", "127.0.0.1", b"", bytes(32))
    link = Link(near, name="control link")
    losses = queue.SimpleQueue()
    ControlGroup(Group(session, {1 - rank: Peer(identity, link)}), on_loss=losses.put)
    with far:
        far.sendall(encode_frame(frame_type, payload))
        assert says in losses.get(timeout=20)
    assert link.wait_ended(20)
    assert "a receiver raised" not in caplog.text
