"""Whole rendezvous over loopback: who meets, who is turned away with which words, and who cannot hold up the rest."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from flare_transport import (
    Address,
    AddressError,
    GreetingSettings,
    RendezvousError,
    RendezvousSettings,
    Security,
    encode_frame,
    meet,
)
from flare_transport.frame_types import ACCEPT, HELLO, PROOF, WELCOME
from flare_transport.handshake import HandshakeSettings, PeerHandshake, Proven
from flare_transport.handshake_messages import Welcome

KEY = bytes(range(32))


@pytest.fixture
def place(loopback_address):
    """Settings of rank zero of two; replace `rank` for the peer."""
    return RendezvousSettings(loopback_address, 0, 2, KEY, deadline_seconds=20)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def connect(address):
    """Connect as a stranger would, waiting for the listener."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            return socket.create_connection((address.host, address.port), timeout=20)
        except ConnectionRefusedError:
            continue
    raise TimeoutError


@pytest.mark.parametrize("security", Security)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_meet_and_hold_authenticated_links(gather_group, make_recorder, world_size, security):
    groups = gather_group(world_size, key=KEY, security=security)
    assert len({group.session.run_id for group in groups}) == 1
    zero = groups[0]
    assert sorted(zero.peers) == list(range(1, world_size))
    for rank, peer in zero.peers.items():
        far = groups[rank].peers[0]
        assert (far.identity.rank, peer.identity.rank) == (0, rank)
        assert peer.identity.certificate == groups[rank].session.certificate
        assert far.identity.certificate_digest == groups[1].peers[0].identity.certificate_digest
        assert (peer.identity.certificate == b"") is (security is Security.PLAINTEXT)
        assert peer.identity.remote_address == peer.identity.local_address == "127.0.0.1"
        near_recorder, far_recorder = make_recorder(), make_recorder()
        peer.link.start(near_recorder.router)
        far.link.start(far_recorder.router)
        peer.link.send(make_recorder.WORD, b"to the peer")
        far.link.send(make_recorder.WORD, b"to rank zero")
        assert (far_recorder.word(), near_recorder.word()) == (b"to the peer", b"to rank zero")


def test_a_world_of_one_opens_no_port():
    group = meet(RendezvousSettings(Address("does.not.exist.invalid", 1), 0, 1, KEY))
    assert group.peers == {}
    assert group.session.certificate == b""
    assert len(group.session.run_id) == 16


def test_each_run_has_another_id(gather_group):
    assert gather_group(2)[0].session.run_id != gather_group(2)[0].session.run_id


def test_the_listener_is_closed_once_all_have_come(place, threads, closing):
    zero = threads.submit(meet, place)
    closing.append(meet(replace(place, rank=1)))
    closing.append(zero.result())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((place.address.host, place.address.port))


def test_a_peer_may_come_long_before_rank_zero(place, threads, closing):
    seen = threading.Event()
    peer = threads.submit(meet, replace(place, rank=1), observe=lambda sighting: seen.set())
    assert seen.wait(20)  # it found nobody and said so
    closing.append(meet(place))
    closing.append(peer.result())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key": b"x" * 32}, "cluster keys differ: --key-file"),
        ({"world_size": 3}, "--world-size 2, the peer --world-size 3"),
        ({"rank": 2, "world_size": 3}, "--world-size 2, the peer --world-size 3"),
        ({"security": Security.PLAINTEXT}, "--insecure-plaintext to every rank or to none"),
    ],
)
def test_a_peer_that_does_not_fit_fails_at_once_and_the_right_one_still_joins(place, threads, closing, change, says):
    sightings = []
    zero = threads.submit(meet, place, observe=sightings.append)
    with pytest.raises(RendezvousError, match=says):
        meet(replace(place, **{"rank": 1, **change}))
    closing.append(meet(replace(place, rank=1)))
    closing.append(zero.result())
    assert any(says.split(":")[0] in sighting.detail for sighting in sightings)
    assert [sighting.rank for sighting in sightings if sighting.has_joined] == [1]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused_locally(place, rank):
    with pytest.raises(RendezvousError, match=f"--rank {rank} is not a rank of --world-size 2"):
        meet(replace(place, rank=rank))


def test_the_second_peer_with_one_rank_is_refused_and_the_first_keeps_its_place(place, threads, closing):
    place = replace(place, world_size=3)
    joined = threading.Event()
    zero = threads.submit(meet, place, observe=lambda sighting: sighting.has_joined and joined.set())
    first = threads.submit(meet, replace(place, rank=1))
    assert joined.wait(20)
    with pytest.raises(RendezvousError, match="another process has already joined as --rank 1"):
        meet(replace(place, rank=1))
    closing += [meet(replace(place, rank=2)), first.result(), zero.result()]
    assert sorted(closing[-1].peers) == [1, 2]


def join_and_leave(place, rank):
    """Take a place by the book up to ACCEPT, in plaintext, and return the connection."""
    sock = connect(place.address)
    machine = PeerHandshake(HandshakeSettings(KEY, place.world_size, Security.PLAINTEXT, b"n" * 32, b""), rank)
    sock.sendall(machine.start())
    while machine.outcome is None:
        sock.sendall(machine.receive(sock.recv(machine.num_bytes_wanted)))
    assert isinstance(machine.outcome, Proven)
    return sock


def test_a_peer_that_dies_while_others_are_awaited_frees_its_place(place, threads, closing):
    place = replace(place, world_size=3, security=Security.PLAINTEXT)
    left = threading.Event()
    zero = threads.submit(meet, place, observe=lambda sighting: "left before" in sighting.detail and left.set())
    join_and_leave(place, 1).close()
    assert left.wait(20)
    peers = [threads.submit(meet, replace(place, rank=rank)) for rank in (1, 2)]
    closing += [each.result() for each in [*peers, zero]]


def test_a_deadline_that_passes_names_the_missing_ranks_and_whoever_was_turned_away(place, threads):
    place = replace(place, world_size=4, deadline_seconds=1.0)
    zero = threads.submit(meet, place)
    present = threads.submit(meet, replace(place, rank=2, deadline_seconds=20))
    with pytest.raises(RendezvousError, match="cluster keys differ"):
        meet(replace(place, rank=1, key=b"x" * 32))
    with pytest.raises(RendezvousError, match=r"ranks 1, 3 did not come .* within 1 s; turned away: 127\.0\.0\.1: the"):
        zero.result()
    with pytest.raises(RendezvousError, match="rank zero gave up waiting: 2 of 4 ranks had come"):
        present.result()


def test_a_peer_that_finds_nobody_says_so(place):
    with pytest.raises(RendezvousError, match=r"within 0\.2 s; last seen there: .*refused"):
        meet(replace(place, rank=1, deadline_seconds=0.2))


def test_a_peer_that_finds_something_else_says_what(place):
    with socket.create_server((place.address.host, place.address.port)) as listener, ThreadPoolExecutor(1) as pool:

        def serve():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                with contextlib.suppress(OSError):
                    sock.recv(4096)

        served = pool.submit(serve)
        with pytest.raises(RendezvousError, match=r"last seen there: .*(flare's frames|timed out)"):
            meet(replace(place, rank=1, deadline_seconds=0.3, greeting=GreetingSettings(deadline_seconds=0.2)))
        served.result()


def test_a_server_without_the_key_gets_no_peer(place):
    with socket.create_server((place.address.host, place.address.port)) as listener, ThreadPoolExecutor(1) as pool:

        def serve():
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                welcome = Welcome(1, (1, 1), Security.TLS, b"r" * 16, b"z" * 32, b"m" * 32, b"attacker")
                sock.sendall(encode_frame(WELCOME, welcome.encode()) + encode_frame(ACCEPT))
                return sock.recv(65536)

        served = pool.submit(serve)
        with pytest.raises(RendezvousError, match="cluster keys differ"):
            meet(replace(place, rank=1))
        assert KEY not in served.result()


def test_silent_and_garbage_connections_do_not_delay_the_right_peer(place, threads, closing):
    place = replace(place, deadline_seconds=30, greeting=GreetingSettings(deadline_seconds=25))
    zero = threads.submit(meet, place)
    strangers = [connect(place.address) for _ in range(200)]
    for index, stranger in enumerate(strangers):
        if index % 2:
            try:
                stranger.sendall([b"\0" * 40, b"GET / HTTP/1.1\r\n\r\n", encode_frame(PROOF, b"x" * 32)][index % 3])
            except OSError:  # sent away already to make room
                continue
    # The silent ones would hold their places for 25 s each; the peer's own deadline is the proof that it is not kept.
    closing.append(meet(replace(place, rank=1, deadline_seconds=10)))
    closing.append(zero.result())
    for stranger in strangers:
        stranger.close()


def test_a_connection_that_sends_a_byte_at_a_time_is_dropped_at_its_deadline(place, threads, closing):
    sightings = []
    dropped = threading.Event()
    place = replace(place, greeting=GreetingSettings(deadline_seconds=0.3))
    zero = threads.submit(
        meet,
        place,
        observe=lambda sighting: (sightings.append(sighting), "timed out" in sighting.detail and dropped.set()),
    )
    with connect(place.address) as slow:
        for byte in encode_frame(HELLO, b""):
            try:
                slow.sendall(bytes([byte]))
            except OSError:
                break
            if dropped.wait(0.05):
                break
        assert dropped.wait(20)
    place = replace(place, greeting=GreetingSettings())
    closing.append(meet(replace(place, rank=1)))
    closing.append(zero.result())


def test_an_old_program_is_refused_with_both_versions(place, threads, closing):
    zero = threads.submit(meet, place)
    with connect(place.address) as sock:
        machine = PeerHandshake(HandshakeSettings(KEY, 2, Security.TLS, b"n" * 32, b"c", versions=(7, 9)), 1)
        sock.sendall(machine.start())
        while machine.outcome is None:
            machine.receive(sock.recv(machine.num_bytes_wanted))
        assert "rank zero speaks 1, the peer 7 to 9" in machine.outcome.describe()
    closing.append(meet(replace(place, rank=1)))
    closing.append(zero.result())


def test_a_proven_peer_whose_tls_shows_another_certificate_does_not_get_its_place(place, threads, closing):
    refused = threading.Event()
    zero = threads.submit(meet, place, observe=lambda sighting: "TLS" in sighting.detail and refused.set())
    from flare_transport.certificates import make_credentials, secure_socket

    shown, promised = make_credentials(), make_credentials()
    sock = connect(place.address)
    machine = PeerHandshake(HandshakeSettings(KEY, 2, Security.TLS, b"n" * 32, promised.certificate), 1)
    sock.sendall(machine.start())
    while machine.outcome is None:
        sock.sendall(machine.receive(sock.recv(machine.num_bytes_wanted)))
    closing.append(
        secure_socket(sock, shown, peer_certificate=machine.outcome.certificate, is_server=False, timeout_seconds=10)
    )
    assert refused.wait(20)
    closing.append(meet(replace(place, rank=1)))
    closing.append(zero.result())


def test_rank_zero_listens_on_the_given_address_alone(place, threads, closing):
    zero = threads.submit(meet, place)
    connect(place.address).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place.address.port))
    closing.append(meet(replace(place, rank=1)))
    closing.append(zero.result())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_address_is_refused(place, host):
    with pytest.raises(AddressError, match="every interface"):
        meet(replace(place, address=Address(host, 7000)))


def test_an_address_in_use_or_of_another_host_is_named(place):
    taken = socket.create_server((place.address.host, place.address.port))
    with taken, pytest.raises(AddressError, match=f"cannot listen on {place.address}: Address already in use"):
        meet(place)
    with pytest.raises(AddressError, match=r"cannot listen on 203\.0\.113\.1:7000"):
        meet(replace(place, address=Address("203.0.113.1", 7000)))
    with pytest.raises(AddressError, match=r"cannot resolve does\.not\.exist\.invalid:1"):
        meet(replace(place, address=Address("does.not.exist.invalid", 1)))


def test_a_key_is_not_in_the_repr(place):
    assert "x01" not in repr(place)
    assert "key=" not in repr(place)
