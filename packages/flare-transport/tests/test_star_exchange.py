"""All-gather through rank zero: order, sizes, lost links and peers that misbehave."""

import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_transport import (
    EndCause,
    Link,
    LinkLost,
    LocalProtocolError,
    RemoteProtocolError,
    Router,
    StarExchange,
    encode_frame,
)
from flare_transport.exchange import _split_whole
from flare_transport.frame_types import EXCHANGE_PART, EXCHANGE_WHOLE


@pytest.fixture
def exchanges(gather_group):
    """A function that returns the exchanges of a group's ranks, over real links."""

    def make(world_size):
        groups = gather_group(world_size)
        found = [StarExchange(rank, world_size) for rank in range(world_size)]
        for exchange, group in zip(found, groups, strict=True):
            for rank, peer in group.peers.items():
                router = Router()
                exchange.attach(rank, peer.link, router)
                peer.link.start(router)
        return groups, found

    return make


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_gets_every_part_by_rank_round_after_round(exchanges, world_size):
    _, found = exchanges(world_size)

    def run(exchange):
        rank = found.index(exchange)
        return [exchange.all_gather(b"%d.%d" % (number, rank) * (rank + number)) for number in range(20)]

    with ThreadPoolExecutor(world_size) as ranks:
        results = list(ranks.map(run, found))
    expected = [[b"%d.%d" % (n, rank) * (rank + n) for rank in range(world_size)] for n in range(20)]
    assert results == [expected] * world_size


def test_large_parts_travel(exchanges):
    _, found = exchanges(2)
    part = bytes(range(256)) * 4096 * 8
    with ThreadPoolExecutor(2) as ranks:
        results = list(ranks.map(lambda exchange: exchange.all_gather(memoryview(part)), found))
    assert results == [[part, part]] * 2


def test_a_part_too_large_for_one_frame_is_refused_before_anything_is_sent(exchanges):
    _, found = exchanges(3)
    with pytest.raises(LocalProtocolError, match="too large to gather from 3 ranks"):
        found[1].all_gather(bytes(30 << 20))
    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(lambda exchange: exchange.all_gather(b"x"), found)) == [[b"x"] * 3] * 3


def test_a_part_that_does_not_come_in_time_is_a_timeout(exchanges):
    _, found = exchanges(2)
    with pytest.raises(TimeoutError, match="exchange 0"):
        found[0].all_gather(b"", timeout_seconds=0.05)
    with pytest.raises(LinkLost, match="exchange 0"):
        found[0].all_gather(b"")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_link_fails_those_who_wait(exchanges, rank):
    groups, found = exchanges(3)
    with ThreadPoolExecutor(2) as ranks:
        waiting = [ranks.submit(found[each].all_gather, b"") for each in (0, 1)]
        groups[2].peers[0].link.close()
        with pytest.raises(LinkLost):
            waiting[0].result(timeout=20)
        groups[0].peers[1].link.close()
        with pytest.raises(LinkLost):
            waiting[1].result(timeout=20)
    with pytest.raises(LinkLost):
        found[rank].all_gather(b"")


@pytest.fixture
def bare(tcp_pair, closing):
    """A function that attaches one rank's exchange to a link; returns it, the bare far end, and a wait for the end."""

    def start(rank, world_size):
        near, far = tcp_pair()
        router, ends, done = Router(), [], threading.Event()
        link = Link(near, name="near")
        closing.append(link)
        exchange = StarExchange(rank, world_size)
        exchange.attach(1 if rank == 0 else 0, link, router)
        router.on_end(lambda link, end: (ends.append(end), done.set()))
        link.start(router)

        def end():
            assert done.wait(20)
            return ends[0]

        return exchange, far, end

    return start


@pytest.mark.parametrize(
    "parts",
    [[b"short"], [struct.pack("<Q", 1)], [struct.pack("<Q", 0), struct.pack("<Q", 0)]],
    ids=["short", "ahead", "twice"],
)
def test_a_peer_whose_part_is_malformed_or_out_of_turn_loses_its_link(bare, parts):
    _, far, end = bare(0, 3)
    for part in parts:
        far.sendall(encode_frame(EXCHANGE_PART, part))
    assert end().cause is EndCause.PROTOCOL


def test_a_peer_whose_part_leaves_no_room_for_the_others_loses_its_link(bare):
    _, far, end = bare(0, 8)
    far.sendall(encode_frame(EXCHANGE_PART, struct.pack("<Q", 0) + bytes(9 << 20)))
    assert "too large to gather" in end().detail


@pytest.mark.parametrize(
    "whole",
    [b"", struct.pack("<QI", 0, 9), struct.pack("<QII", 0, 0, 0) + b"x", struct.pack("<QII", 5, 0, 0)],
)
def test_a_whole_that_is_malformed_or_not_awaited_ends_the_link(bare, whole):
    _, far, end = bare(1, 2)
    far.sendall(encode_frame(EXCHANGE_WHOLE, whole))
    assert end().cause is EndCause.PROTOCOL


def test_a_whole_that_nobody_called_for_ends_the_link(bare):
    _, far, end = bare(1, 2)
    far.sendall(encode_frame(EXCHANGE_WHOLE, struct.pack("<QII", 0, 0, 0)))
    assert "out of turn" in end().detail


def test_a_peer_that_does_not_read_its_wholes_is_failed(bare):
    exchange, far, end = bare(0, 2)

    def exchange_often():
        for number in range(100):
            far.sendall(encode_frame(EXCHANGE_PART, struct.pack("<Q", number)))
            exchange.all_gather(bytes(12 << 20))

    with pytest.raises(LinkLost, match="does not read what it exchanges"):
        exchange_often()
    assert end().cause is EndCause.FAILED_HERE


@given(st.integers(0, 1 << 63), st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.data())
def test_a_whole_splits_into_its_parts_and_a_cut_one_does_not(number, parts, data):
    frame = struct.pack("<Q", number) + b"".join(struct.pack("<I", len(part)) + part for part in parts)
    assert _split_whole(memoryview(frame), len(parts)) == (number, parts)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(RemoteProtocolError):
        _split_whole(memoryview(frame[:cut]), len(parts))
