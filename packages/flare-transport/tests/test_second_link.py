"""Second connections: only the right peer, from its address, with its certificate and its proof, once, in time."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest

from flare_transport import (
    GreetingSettings,
    LinkOffer,
    SecondLinkError,
    Security,
    dial_link,
    encode_frame,
    open_link_listener,
)
from flare_transport.certificates import make_credentials, secure_socket
from flare_transport.frame_types import LINK_ACCEPT, LINK_PROOF
from flare_transport.second_link import dialler_proof, listener_proof


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def record_listener(closing):
    """A function that opens rank zero's listener for every peer of its group."""

    def open_it(groups, **settings):
        identities = [peer.identity for peer in groups[0].peers.values()]
        greeting = GreetingSettings(**settings) if settings else None
        listener = open_link_listener(groups[0].session, identities, purpose="record", settings=greeting)
        closing.append(listener)
        return listener

    return open_it


def dial(groups, rank, offer, **changes):
    return dial_link(replace(groups[rank].session, **changes), groups[rank].peers[0].identity, offer, timeout_seconds=5)


@pytest.mark.parametrize("security", Security)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_peer_gets_its_own_link(
    gather_group, record_listener, threads, closing, make_recorder, world_size, security
):
    groups = gather_group(world_size, security=security)
    listener = record_listener(groups)
    # An offer travels as a message of the consumer's.
    offers = {
        rank: msgspec.msgpack.decode(msgspec.msgpack.encode(offer), type=LinkOffer)
        for rank, offer in listener.offers.items()
    }
    assert len({offer.port for offer in offers.values()}) == world_size - 1
    accepted = threads.submit(listener.accept)
    dialled = {rank: dial(groups, rank, offer) for rank, offer in offers.items()}
    links = accepted.result()
    closing += [*links.values(), *dialled.values()]
    assert sorted(links) == list(range(1, world_size))
    for rank, link in links.items():
        recorders = make_recorder(), make_recorder()
        link.start(recorders[0].router)
        dialled[rank].start(recorders[1].router)
        link.send(make_recorder.WORD, b"%d" % rank)
        assert recorders[1].word() == b"%d" % rank
        assert link.name == f"record link to rank {rank}"


def test_a_group_of_one_has_no_second_links(gather_group, record_listener):
    assert record_listener(gather_group(1)).accept() == {}


def test_the_listener_is_on_the_local_address_of_the_control_connection(gather_group, record_listener):
    groups = gather_group(2)
    offer = record_listener(groups).offers[1]
    assert offer.host == groups[0].peers[1].identity.local_address == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", offer.port))


@pytest.mark.parametrize("security", Security)
def test_whoever_does_not_come_is_named(gather_group, record_listener, threads, security):
    groups = gather_group(3, security=security)
    listener = record_listener(groups)
    accepted = threads.submit(listener.accept, timeout_seconds=0.5)
    dial(groups, 2, listener.offers[2]).close()
    with pytest.raises(SecondLinkError, match=r"within 0\.5 s from rank 1 \(nothing came\)$"):
        accepted.result()
    with pytest.raises(SecondLinkError, match="could not be opened"):
        dial(groups, 1, listener.offers[1])


def test_a_connection_from_another_address_is_turned_away_and_the_right_one_taken(
    gather_group, record_listener, threads, closing
):
    groups = gather_group(2)
    listener = record_listener(groups)
    accepted = threads.submit(listener.accept)
    stranger = replace(groups[1].peers[0].identity, local_address="127.0.0.9")
    with pytest.raises(SecondLinkError):
        dial_link(groups[1].session, stranger, listener.offers[1])
    closing.append(dial(groups, 1, listener.offers[1]))
    closing.extend(accepted.result().values())


def test_a_connection_from_another_address_is_named_when_nobody_else_comes(gather_group, record_listener, threads):
    groups = gather_group(2)
    listener = record_listener(groups)
    accepted = threads.submit(listener.accept, timeout_seconds=0.5)
    sock = socket.create_connection(("127.0.0.1", listener.offers[1].port), source_address=("127.0.0.9", 0))
    assert sock.recv(1) == b""
    sock.close()
    with pytest.raises(SecondLinkError, match=r"from 127\.0\.0\.9, which is not 127\.0\.0\.1"):
        accepted.result()


def test_a_peer_that_tls_identified_and_whose_proof_is_wrong_fails_at_once(gather_group, record_listener, threads):
    groups = gather_group(2)
    listener = record_listener(groups)
    accepted = threads.submit(listener.accept, timeout_seconds=60)
    with pytest.raises(SecondLinkError):
        dial(groups, 1, msgspec.structs.replace(listener.offers[1], nonce=b"x" * 32))
    with pytest.raises(SecondLinkError, match="rank 1 connected, but its proof could not be read: the proof is wrong"):
        accepted.result()


def test_a_peer_that_tls_identified_and_that_stays_silent_fails_at_the_short_deadline(
    gather_group, record_listener, threads
):
    groups = gather_group(2)
    listener = record_listener(groups, deadline_seconds=0.3)
    accepted = threads.submit(listener.accept, timeout_seconds=60)
    sock = secure_socket(
        socket.create_connection(("127.0.0.1", listener.offers[1].port)),
        groups[1].session.credentials,
        peer_certificate=groups[0].session.certificate,
        is_server=False,
        timeout_seconds=5,
    )
    with pytest.raises(SecondLinkError, match=r"its proof could not be read: .*timed out"):
        accepted.result()
    sock.close()


@pytest.mark.parametrize(
    "change",
    [{"run_id": b"another run.....".ljust(16)}, {"rank": 2}, {"key": b"x" * 32}],
    ids=["run", "rank", "key"],
)
def test_a_proof_of_another_run_rank_or_key_is_refused(gather_group, record_listener, threads, change):
    groups = gather_group(2, security=Security.PLAINTEXT)
    listener = record_listener(groups)
    accepted = threads.submit(listener.accept, timeout_seconds=0.3)
    with pytest.raises(SecondLinkError):
        dial_link(replace(groups[1].session, **change), groups[1].peers[0].identity, listener.offers[1])
    with pytest.raises(SecondLinkError, match="the proof is wrong"):
        accepted.result()


def test_an_offer_of_one_peer_is_of_no_use_to_another(gather_group, record_listener, threads):
    groups = gather_group(3)
    listener = record_listener(groups)
    accepted = threads.submit(listener.accept, timeout_seconds=0.5)
    with pytest.raises(SecondLinkError):
        dial(groups, 2, listener.offers[1])
    with pytest.raises(SecondLinkError, match="rank 1"):
        accepted.result()


def test_an_offer_serves_once(gather_group, record_listener, threads, closing):
    groups = gather_group(3, security=Security.PLAINTEXT)
    listener = record_listener(groups)
    accepted = threads.submit(listener.accept)
    closing.append(dial(groups, 1, listener.offers[1]))
    with pytest.raises(SecondLinkError):
        dial(groups, 1, listener.offers[1])
    closing.append(dial(groups, 2, listener.offers[2]))
    closing.extend(accepted.result().values())


def test_an_attacker_with_a_certificate_of_its_own_is_refused_and_the_right_peer_taken(
    gather_group, record_listener, threads, closing
):
    groups = gather_group(2)
    listener = record_listener(groups)
    accepted = threads.submit(listener.accept)
    with pytest.raises(SecondLinkError):
        dial(groups, 1, listener.offers[1], credentials=make_credentials())
    closing.append(dial(groups, 1, listener.offers[1]))
    closing.extend(accepted.result().values())


def test_silent_connections_do_not_delay_the_right_peer(gather_group, record_listener, threads, closing):
    groups = gather_group(2)
    listener = record_listener(groups, deadline_seconds=25)
    accepted = threads.submit(listener.accept, timeout_seconds=30)
    strangers = [socket.create_connection(("127.0.0.1", listener.offers[1].port)) for _ in range(300)]
    closing.append(dial(groups, 1, listener.offers[1]))
    closing.extend(accepted.result().values())
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("answer", [b"m" * 32, b""])
def test_a_listener_that_cannot_prove_itself_is_refused_by_the_peer(gather_group, threads, answer):
    groups = gather_group(2, security=Security.PLAINTEXT)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(encode_frame(LINK_ACCEPT, answer))

        served = threads.submit(serve)
        with pytest.raises(SecondLinkError, match="did not prove that the offer is its own"):
            dial(groups, 1, LinkOffer("record", "127.0.0.1", server.getsockname()[1], b"n" * 32))
        served.result()


def test_proofs_differ_by_role_purpose_rank_and_nonce(gather_group):
    session = gather_group(1)[0].session
    proofs = {
        dialler_proof(session, "record", 1, b"n" * 32),
        listener_proof(session, "record", 1, b"n" * 32),
        dialler_proof(session, "bulk", 1, b"n" * 32),
        dialler_proof(session, "record", 2, b"n" * 32),
        dialler_proof(session, "record", 1, b"m" * 32),
        dialler_proof(replace(session, run_id=b"r" * 16), "record", 1, b"n" * 32),
    }
    assert len(proofs) == 6
    assert all(len(proof) <= LINK_PROOF.max_bytes for proof in proofs)
