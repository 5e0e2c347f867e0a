"""Connected sockets, links with recorders on them, and whole groups met in threads."""

import queue
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from flare_transport import Address, FrameType, Group, Link, RendezvousSettings, Router, meet
from flare_transport.certificates import make_credentials, secure_socket

WORD = FrameType(40, "WORD", 1 << 20)
BULK = FrameType(41, "BULK", 32 << 20)


class Recorder:
    """A router that keeps what arrives; `word()` and `end()` wait for it."""

    WORD = WORD
    BULK = BULK

    def __init__(self):
        self.words = queue.Queue()
        self.ends = queue.Queue()
        self.router = Router()
        self.router.route(WORD, lambda link, payload: self.words.put(bytes(payload)))
        self.router.route(BULK, lambda link, payload: self.words.put(bytes(payload)))
        self.router.on_end(lambda link, end: self.ends.put(end))

    def word(self):
        return self.words.get(timeout=20)

    def end(self):
        return self.ends.get(timeout=20)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def closing():
    """A list; whatever is appended is closed when the test is over."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def tcp_pair(closing):
    """A function that returns two connected TCP sockets, closed after the test."""

    def connect():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        closing.extend([near, far])
        return near, far

    return connect


@pytest.fixture
def make_recorder():
    """The class `Recorder`."""
    return Recorder


@pytest.fixture
def loopback_address():
    """A loopback address whose port is free."""
    return Address("127.0.0.1", free_port())


@pytest.fixture
def gather_group(closing):
    """A function that lets the ranks of a group meet over loopback; returns one `Group` a rank."""

    def gather(world_size, *, key=bytes(32), **settings) -> list[Group]:
        address = Address("127.0.0.1", free_port())
        with ThreadPoolExecutor(world_size) as ranks:
            met = [
                ranks.submit(
                    meet, RendezvousSettings(address, rank, world_size, key, **{"deadline_seconds": 20, **settings})
                )
                for rank in range(world_size)
            ]
            groups = [each.result() for each in met]
        closing.extend(groups)
        return groups

    return gather


@pytest.fixture
def link_pair(closing):
    """A function that starts two links over two connected sockets; returns ((link, recorder), (link, recorder))."""

    def start(near, far, **start):
        sides = []
        for sock, name in ((near, "near"), (far, "far")):
            link, recorder = Link(sock, name=name), Recorder()
            closing.append(link)
            link.start(recorder.router, **start)
            sides.append((link, recorder))
        return sides

    return start


@pytest.fixture
def secured_pair(tcp_pair, closing):
    """A function that returns two connected TLS sockets, client and server."""

    def connect():
        near, far = tcp_pair()
        ours, theirs = make_credentials(), make_credentials()
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(
                secure_socket, far, theirs, peer_certificate=ours.certificate, is_server=True, timeout_seconds=10
            )
            near = secure_socket(near, ours, peer_certificate=theirs.certificate, is_server=False, timeout_seconds=10)
            closing.extend([near, served.result()])
            return near, served.result()

    return connect


@pytest.fixture(params=["unix", "tcp", "tls"])
def sockets(request, tcp_pair, secured_pair, closing):
    """Two connected sockets of each kind that a link takes."""
    if request.param == "unix":
        closing.extend(socket.socketpair())
        return closing[-2], closing[-1]
    return tcp_pair() if request.param == "tcp" else secured_pair()


@pytest.fixture
def both(sockets, link_pair):
    return link_pair(*sockets)


@pytest.fixture
def one_side(tcp_pair, make_recorder, closing):
    """A function that starts a link on one end of a connection; returns (link, recorder, the bare socket)."""

    def start(link_settings=None, **start):
        near, far = tcp_pair()
        link, recorder = Link(near, name="near", settings=link_settings), make_recorder()
        closing.append(link)
        link.start(recorder.router, **start)
        return link, recorder, far

    return start
