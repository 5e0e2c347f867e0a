"""Heartbeats of a link: their payload, and what silence does."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from flare_transport import (
    HEARTBEAT,
    EndCause,
    HeartbeatSettings,
    Link,
    LinkSettings,
    LinkState,
    QueueFull,
    Router,
    encode_frame,
)

QUICK = HeartbeatSettings(interval_seconds=0.02, deadline_seconds=0.4)


def test_heartbeats_carry_the_payload_of_each_side_and_keep_a_quiet_link_alive(sockets, closing):
    links, heard = [], []
    for sock, name in zip(sockets, (b"near", b"far"), strict=True):
        router, seen = Router(), threading.Semaphore(0)
        heard.append((seen, []))
        router.route(
            HEARTBEAT,
            lambda link, payload, box=heard[-1]: (box[1].append(bytes(payload)), box[0].release()),
        )
        link = Link(sock, name=name.decode(), settings=LinkSettings(heartbeat=QUICK))
        closing.append(link)
        link.start(router, pulse=lambda name=name: name)
        links.append(link)
    for seen, _ in heard:
        for _ in range(30):  # longer than the deadline
            assert seen.acquire(timeout=20)
    assert set(heard[0][1]) == {b"far"}
    assert set(heard[1][1]) == {b"near"}
    assert all(link.state is LinkState.OPEN for link in links)


def test_silence_for_the_deadline_ends_the_link(one_side):
    _, recorder, _ = one_side(LinkSettings(heartbeat=QUICK), pulse=lambda: b"")
    end = recorder.end()
    assert end.cause is EndCause.SILENT
    assert "no heartbeat for 0.4 s" in end.detail


def test_other_frames_do_not_stand_in_for_heartbeats(one_side, make_recorder):
    _, recorder, far = one_side(LinkSettings(heartbeat=QUICK), pulse=lambda: b"")
    stop = threading.Event()

    def chatter():
        with contextlib.suppress(OSError):
            while not stop.wait(0.02):
                far.sendall(encode_frame(make_recorder.WORD, b"chatter"))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(chatter)
        assert recorder.end().cause is EndCause.SILENT
        stop.set()


def test_a_withheld_heartbeat_makes_the_other_side_give_up(sockets):
    settings = LinkSettings(heartbeat=QUICK)
    dumb, keen = (
        Link(sock, name=name, settings=settings) for sock, name in zip(sockets, ("dumb", "keen"), strict=True)
    )
    ends = {}
    done = threading.Event()
    router = Router()
    router.on_end(lambda link, end: (ends.update({link.name: end}), done.set()))
    dumb.start(Router(), pulse=lambda: None)
    keen.start(router, pulse=lambda: b"here")
    assert done.wait(20)
    assert ends["keen"].cause is EndCause.SILENT
    dumb.close()
    keen.close()


def test_a_heartbeat_that_cannot_be_queued_is_left_out(one_side, make_recorder):
    link, recorder, _far = one_side(LinkSettings(max_queue_frames=2, heartbeat=QUICK), pulse=lambda: b"")
    with contextlib.suppress(QueueFull):
        for _ in range(100):
            link.send(make_recorder.WORD, bytes(1 << 20))
    assert recorder.end().cause is EndCause.SILENT
