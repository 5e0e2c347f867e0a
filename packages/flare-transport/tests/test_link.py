"""Links over real sockets: order, bounds, heartbeats, and exactly one end with its cause."""

import contextlib
import os
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_transport import (
    HEARTBEAT,
    EndCause,
    FrameType,
    Link,
    LinkLost,
    LinkSettings,
    LinkState,
    LocalProtocolError,
    QueueFull,
    Router,
    encode_frame,
    local_link,
)
from flare_transport.frame_types import BYE


def test_frames_arrive_in_order_and_whole(both, make_recorder):
    (near, _), (_, received) = both
    words = [os.urandom(size) for size in (0, 1, 100, 70_000, 300_000, 5)]
    for word in words:
        near.send(make_recorder.WORD, word)
    assert [received.word() for _ in words] == words


def test_large_frames_cross_in_both_directions_at_once(both, make_recorder):
    (near, near_received), (far, far_received) = both
    bulk = os.urandom(12 << 20)
    near.send(make_recorder.BULK, bulk)
    far.send(make_recorder.BULK, bulk[::-1])
    assert far_received.word() == bulk
    assert near_received.word() == bulk[::-1]


def test_frames_of_several_threads_are_never_mixed(both, make_recorder):
    (near, _), (_, received) = both

    def send(letter):
        for size in range(0, 4000, 40):
            near.send(make_recorder.WORD, letter * size)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(send, [b"a", b"b", b"c", b"d"]))
    words = [received.word() for _ in range(400)]
    assert all(len(set(word)) <= 1 for word in words)
    for letter in b"abcd":
        sizes = [len(word) for word in words if word and word[0] == letter]
        assert sizes == sorted(sizes)


def test_a_receiver_may_answer_from_the_io_thread(both, make_recorder):
    (near, received), (_far, _) = both
    echo = FrameType(50, "ECHO", 10)
    received.router.route(echo, lambda link, payload: received.words.put(bytes(payload)))
    near_router, far_router = received.router, both[1][1].router
    far_router.route(FrameType(51, "ASK", 10), lambda link, payload: link.send(echo, payload))
    assert near_router.types[50] == echo
    near.send(FrameType(51, "ASK", 10), b"hm")
    assert received.word() == b"hm"


def test_shutdown_delivers_everything_then_ends_both_sides_in_order(both, make_recorder):
    (near, near_received), (far, far_received) = both
    bulk = os.urandom(6 << 20)
    near.send(make_recorder.BULK, bulk)
    near.shutdown()
    near.shutdown()
    with pytest.raises(LinkLost):
        near.send(make_recorder.WORD, b"late")
    assert far_received.word() == bulk
    assert near_received.end().cause is EndCause.CLOSED_HERE
    assert far_received.end().cause is EndCause.CLOSED_BY_PEER
    assert near.wait_ended(20)
    assert far.wait_ended(20)
    assert near.state is far.state is LinkState.ENDED
    assert not near.end.is_loss
    assert not far.end.is_loss
    near.shutdown()


def test_both_sides_may_shut_down_at_once(both):
    (near, near_received), (far, far_received) = both
    near.shutdown()
    far.shutdown()
    assert not near_received.end().is_loss
    assert not far_received.end().is_loss


def test_what_the_other_side_still_sends_during_shutdown_arrives(sockets, link_pair, make_recorder):
    (near, near_received), (far, _) = link_pair(*sockets)
    bulk = os.urandom(6 << 20)
    far.send(make_recorder.BULK, bulk)
    near.shutdown()
    assert near_received.word() == bulk
    assert near_received.end().cause is EndCause.CLOSED_HERE


def test_close_is_idempotent_and_the_other_side_sees_a_loss(both):
    (near, near_received), (_, far_received) = both
    near.close()
    near.close()
    assert near_received.end().cause is EndCause.CLOSED_HERE
    end = far_received.end()
    assert end.cause is EndCause.DISCONNECTED
    assert end.is_loss


def test_fail_ends_the_link_with_the_callers_reason(both, make_recorder):
    (near, near_received), (_, far_received) = both
    near.fail("rank 2 outlived its deadline")
    near.fail("second reason")
    end = near_received.end()
    assert (end.cause, end.detail) == (EndCause.FAILED_HERE, "near: rank 2 outlived its deadline")
    assert far_received.end().is_loss
    near.wait_ended(20)
    with pytest.raises(LinkLost, match="outlived its deadline"):
        near.send(make_recorder.WORD, b"late")


def test_the_end_is_reported_once_whatever_comes_together(both):
    (near, near_received), (far, far_received) = both
    with ThreadPoolExecutor(6) as threads:
        for act in (near.close, near.shutdown, lambda: near.fail("x"), far.close, far.shutdown, lambda: far.fail("y")):
            threads.submit(act)
    for link, received in ((near, near_received), (far, far_received)):
        assert link.wait_ended(20)
        assert received.end() == link.end
        assert received.ends.empty()


def send_often(link, frame_type, payload):
    for _ in range(1000):
        link.send(frame_type, payload)


def test_a_peer_that_does_not_read_fills_the_bounded_queue_and_send_never_blocks(one_side, make_recorder):
    link, _, _ = one_side(LinkSettings(max_queue_bytes=1 << 20))
    piece = bytes(1 << 19)
    with pytest.raises(QueueFull, match="the limits are 4096 frames and 1048576 bytes"):
        send_often(link, make_recorder.WORD, piece)
    assert link.state is LinkState.OPEN


def test_the_queue_is_bounded_in_frames_too(one_side, make_recorder):
    link, _, _ = one_side(LinkSettings(max_queue_frames=8))
    with pytest.raises(QueueFull, match="8 frames"):
        send_often(link, make_recorder.WORD, bytes(1 << 19))


def test_a_frame_over_its_limit_is_refused_and_the_link_goes_on(both, make_recorder):
    (near, _), (_, received) = both
    with pytest.raises(LocalProtocolError, match="over its limit"):
        near.send(FrameType(40, "WORD", 3), b"1234")
    near.send(make_recorder.WORD, b"fine")
    assert received.word() == b"fine"


def test_a_shutdown_that_the_other_side_does_not_answer_ends_by_force(one_side):
    link, recorder, _ = one_side(LinkSettings(drain_seconds=0.05))
    link.shutdown()
    end = recorder.end()
    assert end.cause is EndCause.CLOSED_HERE
    assert "did not finish within 0.05 s" in end.detail


def test_a_peer_that_says_bye_and_never_reads_is_dropped_after_the_drain_time(one_side, make_recorder):
    link, recorder, far = one_side(LinkSettings(drain_seconds=0.1))
    for _ in range(10):
        link.send(make_recorder.WORD, bytes(1 << 20))
    far.sendall(encode_frame(BYE))
    assert recorder.end().cause is EndCause.DISCONNECTED


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_connection_cut_inside_a_frame_is_a_loss(one_side, make_recorder, cut):
    _, recorder, far = one_side()
    far.sendall(encode_frame(make_recorder.WORD, b"first") + encode_frame(make_recorder.WORD, b"second")[:cut])
    far.close()
    assert recorder.word() == b"first"
    end = recorder.end()
    assert end.cause is EndCause.DISCONNECTED
    assert "ended inside" in end.detail


def test_a_connection_closed_between_frames_without_bye_is_a_loss(one_side, make_recorder):
    _, recorder, far = one_side()
    far.sendall(encode_frame(make_recorder.WORD, b"last"))
    far.close()
    assert recorder.word() == b"last"
    assert "without BYE" in recorder.end().detail


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "magic"),
        (encode_frame(FrameType(77, "UNKNOWN", 1), b"x"), "frame type 77"),
        (encode_frame(FrameType(40, "WORD", 8 << 20), bytes(2 << 20)), "announces 2097152 bytes"),
        (encode_frame(BYE) + encode_frame(FrameType(40, "WORD", 1), b"x"), "after BYE"),
    ],
)
def test_a_protocol_fault_ends_the_link_with_what_was_wrong(one_side, stream, says):
    _, recorder, far = one_side()
    with contextlib.suppress(OSError):
        far.sendall(stream)
    end = recorder.end()
    assert end.cause is EndCause.PROTOCOL
    assert says in end.detail


def test_a_reset_connection_is_a_loss(one_side):
    _, recorder, far = one_side()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    far.close()
    assert recorder.end().cause is EndCause.DISCONNECTED


def test_a_receiver_that_raises_ends_its_link_and_says_so(one_side, make_recorder, caplog):
    link, recorder, far = one_side()
    recorder.router.route(FrameType(60, "BAD", 1), lambda link, payload: {}["missing"])
    far.sendall(encode_frame(FrameType(60, "BAD", 1)))
    end = recorder.end()
    assert end.cause is EndCause.RECEIVER_RAISED
    assert "KeyError" in end.detail
    assert "a receiver raised" in caplog.text
    assert link.wait_ended(20)


def test_a_receiver_that_fails_the_link_receives_nothing_more(one_side, make_recorder):
    _, recorder, far = one_side()
    recorder.router.route(FrameType(60, "STOP", 1), lambda link, payload: link.fail("enough"))
    far.sendall(encode_frame(FrameType(60, "STOP", 1)) + encode_frame(make_recorder.WORD, b"never"))
    assert recorder.end().cause is EndCause.FAILED_HERE
    assert recorder.words.empty()


def test_an_end_listener_that_raises_is_logged(tcp_pair, closing, caplog):
    near, far = tcp_pair()
    router = Router()
    router.on_end(lambda link, end: {}["missing"])
    link = Link(near, name="near")
    closing.append(link)
    link.start(router)
    far.close()
    assert link.wait_ended(20)
    assert "an end listener raised" in caplog.text


def test_a_link_that_was_not_started_sends_nothing_and_closes(tcp_pair, make_recorder):
    for end in (Link.close, Link.shutdown, lambda link: link.fail("x")):
        near, far = tcp_pair()
        link = Link(near, name="near")
        assert (link.state, link.end) == (LinkState.NEW, None)
        assert not link.wait_ended(0)
        with pytest.raises(LocalProtocolError, match="was not started"):
            link.send(make_recorder.WORD, b"x")
        end(link)
        assert link.state is LinkState.ENDED
        assert link.wait_ended(0)
        assert far.recv(1) == b""
        with pytest.raises(LinkLost):
            link.send(make_recorder.WORD, b"x")


def test_a_link_starts_once(both):
    (near, _), _ = both
    with pytest.raises(LocalProtocolError, match="cannot start: it is open"):
        near.start(Router())


def test_a_frame_code_is_routed_once_and_bye_never():
    router = Router()
    router.route(HEARTBEAT, lambda link, payload: None)
    for taken in (FrameType(HEARTBEAT.code, "OTHER", 1), BYE):
        with pytest.raises(LocalProtocolError, match="is taken"):
            router.route(taken, lambda link, payload: None)


def test_frames_that_came_before_the_start_are_delivered(tcp_pair, make_recorder, closing):
    near, far = tcp_pair()
    far.sendall(encode_frame(make_recorder.WORD, b"early"))
    select.select([near], [], [], 20)
    link, recorder = Link(near, name="near"), make_recorder()
    closing.append(link)
    link.start(recorder.router)
    assert recorder.word() == b"early"


def test_frames_that_wait_inside_tls_at_the_start_are_delivered(secured_pair, make_recorder, closing):
    near, far = secured_pair()
    far.sendall(b"0123456789" + encode_frame(make_recorder.WORD, b"of the same record"))
    assert near.recv(10) == b"0123456789"
    link, recorder = Link(near, name="near"), make_recorder()
    closing.append(link)
    link.start(recorder.router)
    assert recorder.word() == b"of the same record"


def test_a_local_link_takes_a_unix_stream_socket_only(tcp_pair, closing, make_recorder):
    near, _ = tcp_pair()
    with pytest.raises(LocalProtocolError, match="Unix"):
        local_link(near)
    ends = [local_link(sock, name=name) for sock, name in zip(socket.socketpair(), ("api", "worker"), strict=True)]
    closing.extend(ends)
    recorders = [make_recorder() for _ in ends]
    for link, recorder in zip(ends, recorders, strict=True):
        link.start(recorder.router)
    ends[0].send(make_recorder.WORD, b"to the worker")
    assert recorders[1].word() == b"to the worker"


@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(max_size=100_000), max_size=10))
def test_whatever_is_sent_arrives_before_a_shutdown(words):
    received, ended = [], threading.Event()
    near, far = (local_link(sock, name="local") for sock in socket.socketpair())
    router = Router()
    router.route(FrameType(40, "WORD", 1 << 20), lambda link, payload: received.append(bytes(payload)))
    router.on_end(lambda link, end: ended.set())
    far.start(router)
    near.start(Router())
    for word in words:
        near.send(FrameType(40, "WORD", 1 << 20), word)
    near.shutdown()
    assert ended.wait(20)
    assert received == words
    assert near.wait_ended(20)
