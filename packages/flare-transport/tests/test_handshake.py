"""Both handshake machines over a fake wire: who is let in, who is refused and why, and what an attacker can do."""

import hashlib
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_transport import FrameDecoder, LocalProtocolError, RemoteProtocolError, Security, encode_frame
from flare_transport.frame_types import ACCEPT, ALL_FRAME_TYPES, HELLO, PROOF, REFUSE, WELCOME, by_code
from flare_transport.handshake import (
    PEER_TABLE,
    RANK_ZERO_TABLE,
    HandshakeSettings,
    HandshakeState,
    PeerHandshake,
    Proven,
    RankZeroHandshake,
    rendezvous_key,
)
from flare_transport.handshake_messages import (
    Refusal,
    RefusalCode,
    Welcome,
    decode_hello,
    decode_refusal,
    decode_welcome,
    transcript_mac,
    transcript_of,
)

KEY = bytes(range(32))
RUN_ID = b"r" * 16
PEER = HandshakeSettings(KEY, 3, Security.TLS, b"p" * 32, b"peer certificate")
ZERO = HandshakeSettings(KEY, 3, Security.TLS, b"z" * 32, b"rank zero certificate")


def pair(peer=PEER, zero=ZERO, rank=1):
    return PeerHandshake(peer, rank), RankZeroHandshake(zero, RUN_ID)


def transfer(peer, zero):
    """Carry bytes to and fro until neither side has more to say; returns all that was said."""
    said = [peer.start()]
    while said[-1]:
        said.append((zero if len(said) % 2 else peer).receive(said[-1]))
    return said


def run(peer, zero):
    said = transfer(peer, zero)
    if isinstance(zero.outcome, Proven):
        said.append(zero.accept())
        peer.receive(said[-1])
    return said


def only_payload(stream):
    (frame,) = FrameDecoder(by_code(*ALL_FRAME_TYPES)).receive(stream)
    return bytes(frame.payload)


def test_two_sides_with_one_key_prove_themselves_to_each_other():
    peer, zero = pair()
    run(peer, zero)
    assert peer.outcome == Proven(RUN_ID, 0, b"rank zero certificate")
    assert zero.outcome == Proven(RUN_ID, 1, b"peer certificate")
    assert zero.outcome.certificate_digest == hashlib.sha256(b"peer certificate").digest()
    assert peer.state is zero.state is HandshakeState.ACCEPTED


def test_the_cluster_key_is_never_sent():
    said = b"".join(run(*pair()))
    assert KEY not in said
    assert rendezvous_key(KEY) not in said


@pytest.mark.parametrize(
    ("peer", "rank", "code", "says"),
    [
        (replace(PEER, versions=(2, 4)), 1, RefusalCode.VERSION, "rank zero speaks 1, the peer 2 to 4"),
        (replace(PEER, security=Security.PLAINTEXT), 1, RefusalCode.SECURITY, "--insecure-plaintext to every rank"),
        (replace(PEER, world_size=2), 1, RefusalCode.WORLD_SIZE, "--world-size 3, the peer --world-size 2"),
        (PEER, 0, RefusalCode.RANK, "--rank 0 is not a peer's rank: those are 1 to 2"),
        (PEER, 3, RefusalCode.RANK, "--rank 3 is not"),
    ],
)
def test_a_peer_that_does_not_fit_is_told_why(peer, rank, code, says):
    peer_side, zero_side = pair(peer, rank=rank)
    run(peer_side, zero_side)
    assert peer_side.outcome == zero_side.outcome
    assert peer_side.outcome.code is code
    assert says in peer_side.outcome.describe()
    assert peer_side.state is zero_side.state is HandshakeState.REFUSED


def test_plaintext_on_both_sides_is_agreed():
    peer, zero = pair(
        replace(PEER, security=Security.PLAINTEXT, certificate=b""),
        replace(ZERO, security=Security.PLAINTEXT, certificate=b""),
    )
    run(peer, zero)
    assert isinstance(peer.outcome, Proven)


def test_plaintext_at_rank_zero_alone_is_named():
    peer, zero = pair(zero=replace(ZERO, security=Security.PLAINTEXT))
    run(peer, zero)
    assert "rank zero uses plaintext and the peer TLS" in peer.outcome.describe()


def test_the_highest_common_version_is_chosen():
    peer, zero = pair(replace(PEER, versions=(1, 3)), replace(ZERO, versions=(1, 2)))
    said = run(peer, zero)
    assert decode_welcome(only_payload(said[1])).version == 2
    assert isinstance(peer.outcome, Proven)


def test_another_key_is_seen_by_the_peer_first_and_told_to_rank_zero():
    peer, zero = pair(replace(PEER, key=b"x" * 32))
    said = run(peer, zero)
    assert peer.outcome == zero.outcome == Refusal(RefusalCode.WRONG_KEY)
    assert "--key-file" in peer.outcome.describe()
    assert all(len(each) < 300 for each in said)


def test_a_peer_that_ignores_a_wrong_welcome_is_refused_by_rank_zero():
    peer, zero = pair()
    zero.receive(peer.start())
    answer = zero.receive(encode_frame(PROOF, b"\0" * 32))
    assert zero.outcome == Refusal(RefusalCode.WRONG_KEY) == decode_refusal(only_payload(answer))


def test_a_server_without_the_key_learns_nothing_and_gets_no_proof():
    peer, _ = pair()
    hello = peer.start()
    welcome = Welcome(1, (1, 1), Security.TLS, RUN_ID, b"a" * 32, b"m" * 32, b"attacker certificate")
    answer = peer.receive(encode_frame(WELCOME, welcome.encode()))
    assert decode_refusal(only_payload(answer)).code is RefusalCode.WRONG_KEY
    assert peer.outcome.code is RefusalCode.WRONG_KEY
    assert KEY not in hello + answer


def test_rank_zeros_proof_reflected_is_not_a_peers_proof():
    peer, zero = pair()
    welcome = decode_welcome(only_payload(zero.receive(peer.start())))
    zero.receive(encode_frame(PROOF, welcome.mac))
    assert zero.outcome == Refusal(RefusalCode.WRONG_KEY)


def test_a_recorded_handshake_replayed_is_refused():
    said = run(*pair())
    later = RankZeroHandshake(replace(ZERO, nonce=b"n" * 32), RUN_ID)
    later.receive(said[0])
    later.receive(said[2])
    assert later.outcome == Refusal(RefusalCode.WRONG_KEY)


def test_a_recorded_welcome_replayed_is_refused_by_the_peer():
    said = run(*pair())
    later = PeerHandshake(replace(PEER, nonce=b"n" * 32), 1)
    later.start()
    later.receive(said[1])
    assert later.outcome == Refusal(RefusalCode.WRONG_KEY)


HELLO_CHANGES = [
    {"versions": (0, 1)},
    {"rank": 2},
    {"nonce": b"q" * 32},
    {"certificate": b"another certificate"},
]
WELCOME_CHANGES = [
    {"version": 2},
    {"versions": (0, 1)},
    {"security": Security.PLAINTEXT},
    {"run_id": b"s" * 16},
    {"nonce": b"q" * 32},
    {"mac": b"m" * 32},
    {"certificate": b"another certificate"},
]


@pytest.mark.parametrize("change", HELLO_CHANGES)
def test_a_hello_changed_on_the_way_lets_nobody_in(change):
    peer, zero = pair()
    hello = replace(decode_hello(only_payload(peer.start())), **change)
    peer.receive(zero.receive(encode_frame(HELLO, hello.encode())))
    assert peer.outcome == Refusal(RefusalCode.WRONG_KEY)


@pytest.mark.parametrize("change", WELCOME_CHANGES)
def test_a_welcome_changed_on_the_way_lets_nobody_in(change):
    peer, zero = pair()
    welcome = replace(decode_welcome(only_payload(zero.receive(peer.start()))), **change)
    peer.receive(encode_frame(WELCOME, welcome.encode()))
    assert peer.outcome == Refusal(RefusalCode.WRONG_KEY)


def signed_welcome(peer, **fields):
    hello = decode_hello(only_payload(peer.start()))
    unsigned = replace(Welcome(1, (1, 1), Security.TLS, RUN_ID, b"z" * 32, b"", b"certificate"), **fields)
    mac = transcript_mac(rendezvous_key(KEY), b"srv", transcript_of(hello, unsigned))
    return encode_frame(WELCOME, replace(unsigned, mac=mac).encode())


def test_a_holder_of_the_key_that_welcomes_to_other_security_is_not_believed():
    peer, _ = pair()
    with pytest.raises(RemoteProtocolError, match="another link security"):
        peer.receive(signed_welcome(peer, security=Security.PLAINTEXT))
    assert peer.state is HandshakeState.FAILED


def test_a_holder_of_the_key_that_chooses_an_unoffered_version_is_not_believed():
    peer, _ = pair()
    with pytest.raises(RemoteProtocolError, match="version 7, which was not offered"):
        peer.receive(signed_welcome(peer, version=7))


def test_a_duplicate_rank_is_refused_after_its_proof_and_told_so():
    peer, zero = pair()
    transfer(peer, zero)
    peer.receive(zero.refuse(Refusal(RefusalCode.DUPLICATE_RANK, received=1)))
    assert "already joined as --rank 1" in peer.outcome.describe()
    assert zero.state is peer.state is HandshakeState.REFUSED


def test_only_a_proven_peer_can_be_accepted_or_refused():
    peer, zero = pair()
    zero.receive(peer.start())
    for command in (zero.accept, lambda: zero.refuse(Refusal(RefusalCode.RANK))):
        with pytest.raises(LocalProtocolError, match="proof due"):
            command()


def test_a_handshake_starts_once():
    peer, _ = pair()
    peer.start()
    with pytest.raises(LocalProtocolError):
        peer.start()


def test_another_framing_version_is_refused_with_both_versions():
    _, zero = pair()
    stream = bytearray(encode_frame(HELLO, b""))
    stream[4] = 9
    stream[12:16] = zlib.crc32(bytes(stream[:12])).to_bytes(4, "little")
    refusal = decode_refusal(only_payload(zero.receive(bytes(stream))))
    assert "rank zero speaks 1, the peer 9" in refusal.describe()
    assert zero.outcome == refusal


def machine_in(state):
    """Return a machine brought to this state, whichever role has it."""
    peer, zero = pair()
    if state in {HandshakeState.START, HandshakeState.WELCOME_DUE, HandshakeState.ACCEPT_DUE}:
        if state is not HandshakeState.START:
            hello = peer.start()
            if state is HandshakeState.ACCEPT_DUE:
                peer.receive(zero.receive(hello))
        return peer, PEER_TABLE
    if state is not HandshakeState.HELLO_DUE:
        welcome = zero.receive(peer.start())
        if state is HandshakeState.PROVEN:
            zero.receive(peer.receive(welcome))
    return zero, RANK_ZERO_TABLE


@pytest.mark.parametrize(
    "state",
    [
        HandshakeState.START,
        HandshakeState.WELCOME_DUE,
        HandshakeState.ACCEPT_DUE,
        HandshakeState.HELLO_DUE,
        HandshakeState.PROOF_DUE,
        HandshakeState.PROVEN,
    ],
)
@pytest.mark.parametrize("frame_type", [HELLO, WELCOME, PROOF, ACCEPT, REFUSE])
def test_what_the_table_does_not_allow_fails_the_handshake(state, frame_type):
    machine, table = machine_in(state)
    assert machine.state is state
    if (state, frame_type) in table:
        return
    with pytest.raises(RemoteProtocolError):
        machine.receive(encode_frame(frame_type, b""))
    assert machine.state is HandshakeState.FAILED
    assert not isinstance(machine.outcome, Refusal)


def test_bytes_behind_the_last_message_are_a_fault():
    peer, zero = pair()
    transfer(peer, zero)
    with pytest.raises(RemoteProtocolError, match="accepted"):
        peer.receive(zero.accept() + encode_frame(ACCEPT))


@pytest.mark.parametrize("message", [0, 1, 2, 3])
def test_a_handshake_cut_at_any_byte_lets_nobody_in_and_goes_on_when_the_rest_comes(message):
    length = len(run(*pair())[message if message < 3 else 4])
    for cut in range(length):
        peer, zero = pair()
        said = [peer.start()]
        receivers = [zero, peer, zero, peer]
        for index, receiver in enumerate(receivers):
            data = said[-1] if index < 3 else zero.accept()
            if index == message:
                assert receiver.receive(data[:cut]) == b""
                assert receiver.outcome is None
                assert 0 < receiver.num_bytes_wanted <= max(16, len(data) - cut)
                data = data[cut:]
            said.append(receiver.receive(data))
        assert isinstance(peer.outcome, Proven)
        assert isinstance(zero.outcome, Proven)


@given(st.binary(max_size=300))
def test_garbage_never_gets_an_outcome(garbage):
    for machine in pair():
        if isinstance(machine, PeerHandshake):
            machine.start()
        try:
            machine.receive(garbage)
        except RemoteProtocolError:
            assert machine.state is HandshakeState.FAILED
        assert machine.outcome is None


@given(st.sampled_from([HELLO, WELCOME, PROOF, ACCEPT, REFUSE]), st.binary(max_size=200))
def test_well_framed_garbage_never_proves_anything(frame_type, payload):
    if len(payload) > frame_type.max_bytes:
        return
    for machine in (machine_in(HandshakeState.WELCOME_DUE)[0], machine_in(HandshakeState.PROOF_DUE)[0]):
        try:
            machine.receive(encode_frame(frame_type, payload))
        except RemoteProtocolError:
            assert machine.state is HandshakeState.FAILED
        assert not isinstance(machine.outcome, Proven)
